"""Training acceptance heads (SpecDec++, DISCO): collecting examples, training, evaluation and reports."""
