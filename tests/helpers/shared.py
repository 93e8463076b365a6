"""Rules and optimizers, one object for each setting.

What workers and centers compile is kept by rule and by inner optimizer, so tests that
share these share their programs, and do not compile each its own.
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
downpour = functools.cache(rules.downpour)
dynsgd = functools.cache(rules.dynsgd)
easgd = functools.cache(rules.easgd)
