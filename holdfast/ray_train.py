"""holdfast under Ray Train: ``RunConfig(callbacks=[GiveUp()])`` ends a run where going on is no use.

Nothing else is needed in a training function but `holdfast.InMemorySnapshot`: docs/ray.md has the recipe.
"""

from holdfast.integrations.ray_train import GiveUp

__all__ = ["GiveUp"]
