"""The store on an etcd cluster: `store.EtcdStore` is the back end, the other modules each hold one part of it.

Loaded only when a store URL names etcd, so that nothing else pays for grpc.
"""
