"""The quickstart's own job: a task family, its evaluator, and the small policy that learns it.

`chores` makes the tasks and `evaluate_chores` scores what a run left; `mini_chores.yaml` is the harness's configuration.
`policy/` holds the policy that a job starts from. `warm_start` made it, from `demonstrations` that are rendered
(`rendering`) with the tokenizer of `vocabulary` and taught to `tiny_model`.
"""
