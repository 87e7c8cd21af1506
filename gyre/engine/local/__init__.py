"""The local engine: a small CPU engine that speaks the subset of SGLang's HTTP surface that Gyre uses.

`python -m gyre.engine.local` is the process. From the outside in: `server` (HTTP), `thread` (the command queue),
`core` (continuous batching, synchronous), `prefix_cache` (which block holds what), `kv_memory` (the bytes), `forward`
(the model), `sampling`. Llama and Qwen3 in Hugging Face's layout.
"""
