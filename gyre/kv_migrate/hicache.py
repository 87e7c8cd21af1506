"""What SGLang loads: a HiCache storage back end whose pages are those of the other engines of the job.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "gyre", "module_path": "gyre.kv_migrate.hicache", "class_name": "GyreStorage",
        "interface_v1": 1, "prefetch_threshold": 16, "secret_file": "…", "orders": "127.0.0.1:9001"}'

It stands between SGLang's calls and a `PageExchange`. SGLang asks whether pages are there (`batch_exists`), has them copied
into its host pool (`batch_get_v1`) and says what it has written to that (`batch_set_v1`). It keeps no copies of its own:
what it serves to peers lies in the host pool, for as long as SGLang leaves it there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.radix_cache import RadixKey  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.utils import get_storage_hash_str  # pyright: ignore[reportMissingImports]

from gyre.errors import BadInput
from gyre.kv_migrate.hicache_settings import HicacheSettings
from gyre.kv_migrate.host_pages import HostPages
from gyre.kv_migrate.page_exchange import PageExchange

if TYPE_CHECKING:
    from torch import Tensor


class GyreStorage(HiCacheStorage):  # pyright: ignore[reportUntypedBaseClass]
    """One in each scheduler process. Raises BadInput, which ends the engine's start, for what it cannot serve."""

    def __init__(self, config: Any, _: dict[str, Any] | None = None) -> None:
        extra: dict[str, Any] = dict(config.extra_config or {})
        if not extra.get("interface_v1"):
            raise BadInput("hicache extra config: interface_v1", extra.get("interface_v1"), "1 is expected")
        if config.pp_size * config.attn_cp_size != 1:
            raise BadInput("hicache", f"pp {config.pp_size}", "engines with tensor parallel ranks only are served")
        if config.is_mla_model and config.tp_size != 1:
            # There one rank has the pages of all, and the others have none to give.
            raise BadInput("hicache", f"MLA, tp {config.tp_size}", "models that share their heads out are served")
        settings = HicacheSettings.read(extra)
        self._rank, self._ranks = int(config.tp_rank), int(config.tp_size)
        self._settings = replace(settings, model=settings.model or str(config.model_name))
        self._exchange: PageExchange | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "shared_allocation_domain", None) is not None:
            raise BadInput("host pool", type(mem_pool_host).__name__, "one whose pages stay where they are is expected")
        page_tokens = int(mem_pool_host.page_size)

        def names(token_ids: Sequence[int], version: int) -> list[bytes]:
            whole = len(token_ids) // page_tokens * page_tokens  # SGLang would name a last partial page too
            key = RadixKey(array("q", token_ids[:whole]), extra_key=str(version))
            return [bytes.fromhex(name) for name in get_storage_hash_str(key, page_size=page_tokens)]

        pages = HostPages(mem_pool_host)
        self._exchange = PageExchange(self._settings, pages, page_tokens, names, self._rank, self._ranks)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != "kv":
            raise BadInput("host pool", str(host_pool_name), "models with plain KV only are served")

    # ------------------------------------------------------------------------------------------ what SGLang calls

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        return self._joined().present([bytes.fromhex(key) for key in keys])

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: object = None) -> list[bool]:
        return self._joined().fetch([bytes.fromhex(key) for key in keys], host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: object = None) -> list[bool]:
        self._joined().written([bytes.fromhex(key) for key in keys], host_indices)
        return [True] * len(keys)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    # ------------------------------------------------------------------------------------------ what it does not

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> None:
        raise NotImplementedError("pages go by batch_get_v1")

    def batch_get(self, keys: list[str], target_locations: object = None, target_sizes: object = None) -> Any:
        raise NotImplementedError("pages go by batch_get_v1")

    def set(self, key: str, value: object = None, target_location: object = None, target_sizes: object = None) -> bool:
        raise NotImplementedError("pages go by batch_set_v1")

    def batch_set(
        self, keys: list[str], values: object = None, target_locations: object = None, target_sizes: object = None
    ) -> bool:
        raise NotImplementedError("pages go by batch_set_v1")

    def _joined(self) -> PageExchange:
        assert self._exchange is not None, "SGLang registers its host pool before it uses a storage"
        return self._exchange
