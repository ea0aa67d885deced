"""Programs that run in the processes of peers. They import only the standard library and the peer's own package."""
