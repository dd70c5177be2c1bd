"""Plain JAX implementations: `implementation="xla"`, which runs anywhere and accepts everything."""
