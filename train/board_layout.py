"""The charts of TensorBoard's Custom Scalars tab, those that matter first on top.

The same in all runs: TensorBoard joins their layouts, and shows a chart once only if it is the same in each
of them.
"""

from typing import Any

MFU = "MFU, predicted too"
# Category -> chart -> regular expressions of tags, matched at a tag's beginning.
CHARTS = {
    "Overview": {
        "Loss: train and eval": ["loss/(train|eval)$"],
        "Tokens/s per GPU, predicted too": ["speed/tokens_per_s_per_gpu(_predicted)?$"],
        "Peak memory in GiB, predicted too": ["memory/peak_gib(_predicted)?$", "memory/reserved_gib$"],
        MFU: ["speed/mfu(_causal)?(_predicted)?$"],
        "Seconds: step (predicted too), wait for data": ["speed/step_time_s(_predicted)?$", "data/wait_s$"],
        "Gradient norm": ["optimizer/grad_norm$"],
        "Learning rate": ["optimizer/lr$"],
    },
    "More": {
        "Loss of each set": ["eval/.*/loss$"],
        "Bits per byte of each set": ["eval/.*/bits_per_byte$"],
        "Gradient norm of each unit (metrics.gradient_norms)": ["gradient_norm/"],
    },
}
CLOSED = frozenset({"More"})  # until one opens them


def layout_summary(mfu: bool) -> Any:
    """The layout as a summary of an event file; with the chart of MFUs where there are any."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata  # type: ignore[import-untyped]

    categories = [
        layout_pb2.Category(
            title=title,
            closed=title in CLOSED,
            chart=[
                layout_pb2.Chart(title=chart, multiline=layout_pb2.MultilineChartContent(tag=tags))
                for chart, tags in charts.items()
                if chart != MFU or mfu
            ],
        )
        for title, charts in CHARTS.items()
    ]
    layout = layout_pb2.Layout(category=categories).SerializeToString()
    tensor = TensorProto(dtype="DT_STRING", string_val=[layout], tensor_shape=TensorShapeProto())
    tag, about = metadata.CONFIG_SUMMARY_TAG, metadata.create_summary_metadata()
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=about)])
