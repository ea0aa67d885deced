"""Training predictors (SpecDec++, DISCO): collecting examples, training, evaluation and reports."""
