"""How well a draft's signals predict acceptance: the numbers and reports of `specctl analyze`."""
