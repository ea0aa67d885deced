"""How well a draft's signals predict acceptance: what `specctl analyze` computes and shows."""
