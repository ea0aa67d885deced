"""Training acceptance heads (SpecDec++): collecting examples, training, evaluation and reports."""
