"""What connects the processes: settings, servers, channels, discovery and the KV link. Knows no model."""
