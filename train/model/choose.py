"""Chooses what stands for the model of a config."""

from functools import cache

from meshwright.train.config import FactoryConfig, ModelConfig
from meshwright.train.model.llama import LlamaSource
from meshwright.train.model.source import ModelSource


@cache
def source_of(model: ModelConfig) -> ModelSource:
    """Return the source of a config's model. Raises ConfigError if a model of yours cannot be built, and
    PlanError if it cannot be described."""
    if isinstance(model, FactoryConfig):
        from meshwright.train.model.own import OwnSource  # with the planner's tracing: not for our Llama

        return OwnSource(model)
    return LlamaSource(model)
