"""What a draft's signals say about acceptance: the readers behind `specctl analyze`."""
