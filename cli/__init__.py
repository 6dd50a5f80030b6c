"""The `deepinfer` command. Knows how to run and inspect the services as processes; loads no model."""
