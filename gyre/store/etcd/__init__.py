"""The store on an etcd cluster: `store.EtcdStore` is the back end, the other modules each hold one part of it.

Loaded only when a store URL names etcd, so that nothing else pays for grpc.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what a call comes to is told by us, once and in a line
