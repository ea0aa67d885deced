"""Training draft heads: answers of a target, lessons made of them, training, evaluation and reports."""
