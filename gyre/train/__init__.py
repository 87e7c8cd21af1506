"""Training while data arrives (DESIGN §8): the batch's plan and ledger, snapshots on disk, and the Megatron replica.

`batch`, `ledger`, `shape` and `snapshot` import no torch and run in gyred; `replica` and what it is made of
(`megatron`, `maps`, `padding`, `cpu_adapter`) live in the replica process only, and in those of its further ranks (`ranked`).
"""
