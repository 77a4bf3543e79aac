"""A burst: how high TTFT and the queue rose, and when it was over."""
