"""traceproof: proves LLM kernel references right."""

__version__ = "0.1.0"
