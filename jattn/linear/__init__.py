"""Linear attention: recurrences over a state of fixed size, with chunked and recurrent forms and decoding steps."""

from jattn.linear.conv import short_conv as short_conv
from jattn.linear.conv import short_conv_step as short_conv_step
from jattn.linear.decay import gla as gla
from jattn.linear.decay import linear_attention as linear_attention
from jattn.linear.decay import simple_gla as simple_gla
from jattn.linear.delta import delta_rule as delta_rule
from jattn.linear.delta import gated_delta_rule as gated_delta_rule
from jattn.linear.delta import kda as kda
from jattn.linear.gates import gdn_gate as gdn_gate
from jattn.linear.gates import kda_gate as kda_gate
from jattn.linear.gates import l2_norm as l2_norm
from jattn.linear.maps import AffineMap as AffineMap
from jattn.linear.maps import affine_map as affine_map
from jattn.linear.maps import entering_state as entering_state
from jattn.linear.steps import delta_rule_step as delta_rule_step
from jattn.linear.steps import gated_delta_rule_step as gated_delta_rule_step
from jattn.linear.steps import gla_step as gla_step
from jattn.linear.steps import kda_step as kda_step
from jattn.linear.steps import linear_attention_step as linear_attention_step
from jattn.linear.steps import simple_gla_step as simple_gla_step

__all__ = [
    "AffineMap",
    "affine_map",
    "delta_rule",
    "delta_rule_step",
    "entering_state",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gdn_gate",
    "gla",
    "gla_step",
    "kda",
    "kda_gate",
    "kda_step",
    "l2_norm",
    "linear_attention",
    "linear_attention_step",
    "short_conv",
    "short_conv_step",
    "simple_gla",
    "simple_gla_step",
]
