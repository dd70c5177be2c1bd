"""Linear attention: recurrences over a state of fixed size, with chunked and recurrent forms and decoding steps."""

from jattn.linear.decay import gla as gla
from jattn.linear.decay import linear_attention as linear_attention
from jattn.linear.decay import simple_gla as simple_gla
from jattn.linear.delta import delta_rule as delta_rule
from jattn.linear.delta import gated_delta_rule as gated_delta_rule
from jattn.linear.delta import kda as kda

__all__ = ["delta_rule", "gated_delta_rule", "gla", "kda", "linear_attention", "simple_gla"]
