"""Programs for developers of specctl; not in the wheel."""
