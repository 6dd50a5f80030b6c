"""What a process tells about itself: logs and metrics. Neither ever holds prompts, tokens, tenants or secrets."""
