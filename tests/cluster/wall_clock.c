/* Preloaded into a process: its wall clock, and that of its children, is off by what a file says, from that moment on.

GYRE_TEST_CLOCK names the file; it holds seconds, as eight bytes of the machine's order. The monotonic clock, the
kernel's timers and files' times stay as they are, as they do when a machine's wall clock is set. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *off;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("GYRE_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *seen = mmap(NULL, sizeof *off, PROT_READ, MAP_SHARED, file, 0);
    if (seen != MAP_FAILED) off = seen;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && off && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *off;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec seen;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &seen);
    now->tv_sec = seen.tv_sec;
    now->tv_usec = seen.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec seen;
    clock_gettime(CLOCK_REALTIME, &seen);
    if (now) *now = seen.tv_sec;
    return seen.tv_sec;
}
