"""Rules and optimizers, one object for each setting.

Workers and centers cache compiled programs by rule and inner optimizer, so tests that
use these objects share their programs.
"""

import functools

import optax

from agn_optax import rules

adam = functools.cache(optax.adam)
adamw = functools.cache(optax.adamw)
sgd = functools.cache(optax.sgd)

agn = functools.cache(rules.agn)
agn_window = functools.cache(rules.agn_window)
average = functools.cache(rules.average)
diloco = functools.cache(rules.diloco)
decoupled_diloco = functools.cache(rules.decoupled_diloco)
downpour = functools.cache(rules.downpour)
dynsgd = functools.cache(rules.dynsgd)
easgd = functools.cache(rules.easgd)
