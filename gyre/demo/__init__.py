"""The quickstart's own job: a task family, its evaluator, and the small policy that learns it."""
