"""An engine that is neither rows nor processes: what it does is done here, and the last one asked answers first."""

from specctl.text_engine.engine import Answered


class InProcess:
    """Stands for `ProcessEngine`; each place answers with a job of its own, so that nothing passes between them.

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

    def free(self):
        return [number for number in range(self.count) if number not in self._asked]

    def submit(self, place, question):
        self._asked[place] = question

    def step(self, seconds=None):  # noqa: ARG002
        place, question = self._asked.popitem()
        return [Answered(place, self._answers[place](question))]
