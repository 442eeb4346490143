"""A class as TRL's `environment_factory` takes it; it imports nothing of TRL or Penstock."""


class Counter:
    def __init__(self) -> None:
        self.count, self.goal = 0, 0

    def reset(self, goal: int = 3, **kwargs: object) -> str:
        self.count, self.goal = 0, goal
        return f" The goal is {goal}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: How far.

        Returns:
            The count.
        """
        if step < 0:
            raise ValueError("step is negative")
        self.count += step
        return self.count

    async def peek(self) -> str:
        """Look at the counter.

        Returns:
            What it shows.
        """
        return f"it shows {self.count}"

    def get_reward(self) -> float:
        return 1.0 if self.count == self.goal else 0.25

    @property
    def private(self) -> int:
        raise AssertionError("a property is no tool")
