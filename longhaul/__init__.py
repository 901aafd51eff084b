"""DQN whose prioritized replay stays with the actors and whose learner sits across a long-haul link."""

__version__ = "0.1.0"
