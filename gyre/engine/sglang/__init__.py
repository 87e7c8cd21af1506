"""SGLang as a cell's engine: how it is started, and what has to be looked at before it is told what to do."""
