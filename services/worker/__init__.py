"""What the services that run an engine share: geometry of a handoff, packing, status. A library, not a service."""
