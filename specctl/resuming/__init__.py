"""Going on with an interrupted run of `specctl generate`: what it finished, what made it, whether both still fit."""
