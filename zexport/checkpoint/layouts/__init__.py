"""How each layout cuts a model into rank files: the arithmetic, and its use on real files."""
