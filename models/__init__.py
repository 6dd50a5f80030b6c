"""Models kept in this repository. Knows nothing of the services that run them."""
