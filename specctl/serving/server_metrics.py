"""Figures for Prometheus."""

import time

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specctl.serving.text_thread import Ended, TextThread

PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/specctl", "/", "/health", "/metrics"})
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Counts what a server does.

    Args:
        thread: tells how many texts are written and wait, and how many pairs there are for them.
    """

    MEDIA_TYPE = CONTENT_TYPE_LATEST

    def __init__(self, thread: TextThread) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "specctl_requests",
            "Requests that have ended, by path and HTTP status.",
            ["path", "status"],
            registry=registry,
        )
        tokens = Counter("specctl_tokens", "Tokens of prompts and of texts.", ["kind"], registry=registry)
        drafted = Counter(
            "specctl_draft_tokens", "Drafted tokens, accepted and rejected.", ["outcome"], registry=registry
        )
        self._rounds = Counter("specctl_rounds", "Passes of the target that verify.", registry=registry)
        self._first = Histogram(
            "specctl_first_token_seconds", "From a request to its first round.", buckets=SECONDS, registry=registry
        )
        self._seconds = Histogram(
            "specctl_text_seconds", "From a request to the end of its text.", buckets=SECONDS, registry=registry
        )
        running = Gauge("specctl_texts_running", "Texts that are being written.", registry=registry)
        running.set_function(lambda: thread.running)
        prompts = Counter(
            "specctl_prompt_tokens", "Tokens of prompts: read, or kept in caches.", ["how"], registry=registry
        )
        # Found by their labels once: that takes longer than to count.
        self._prompt, self._completion = map(tokens.labels, ("prompt", "completion"))
        self._accepted, self._rejected = map(drafted.labels, ("accepted", "rejected"))
        self._kept, self._read = map(prompts.labels, ("kept", "read"))
        waiting = Gauge("specctl_requests_waiting", "Requests that wait for a row.", registry=registry)
        waiting.set_function(lambda: thread.waiting)
        ready = Gauge("specctl_workers_ready", "Pairs that are loaded and can write.", registry=registry)
        ready.set_function(lambda: thread.ready)

    def request(self, path: str, status: int) -> None:
        """A request has ended."""
        self._requests.labels(path if path in PATHS else "other", str(status)).inc()

    def ended(self, text: Ended, began: float) -> None:
        """A text has been written for a request that came at a time of `time.monotonic`."""
        self._seconds.observe(time.monotonic() - began)
        if text.begun is not None:
            self._first.observe(text.begun - began)
        completion = text.completion
        drafted, accepted = text.drafted_and_accepted
        self._kept.inc(text.kept)
        self._read.inc(completion.prompt_tokens - text.kept)
        self._prompt.inc(completion.prompt_tokens)
        self._completion.inc(len(completion.tokens))
        self._accepted.inc(accepted)
        self._rejected.inc(drafted - accepted)
        self._rounds.inc(len(completion.rounds))

    def page(self) -> bytes:
        return generate_latest(self._registry)
