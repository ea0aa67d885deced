"""Replicas that are no processes: what they do is done here, and the last one asked answers first."""

from specctl.replicas.replica import Answered


class InProcess:
    """Stands for `LocalReplicas`; each answers with a job of its own, so that nothing passes from one to the other.

    Args:
        job: what they do.
        count: how many there are.
    """

    def __init__(self, job, count=2):
        self.count = count
        self._answers = [job.begin(number) for number in range(count)]
        self._asked = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def idle(self):
        return [number for number in range(self.count) if number not in self._asked]

    def ask(self, replica, question):
        self._asked[replica] = question

    def wait(self, seconds=None):  # noqa: ARG002
        replica, question = self._asked.popitem()
        return [Answered(replica, self._answers[replica](question))]
