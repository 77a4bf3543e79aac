"""Judge one stage: its steady part, its SLOs, its verdict."""
