"""The marks that we leave on objects of Keras and on functions, all in one list: names of attributes.

A mark on a layer, model or optimizer is written to its `__dict__`, past Keras' tracking.
"""

# On variables
PART = "_finetooth_part"  # a part's variable, which is no weight of the model
COMPOSED = "_finetooth_composed_with"  # a base that is read merged with its part: the part
FLAG_OF = "_finetooth_flag_of"  # the variable by which a gate tells optimizers whether it is open: a reference to it

# On layers and models
TUNED = "_finetooth_tuned"  # a layer that is being tuned; the class of a variable that is
TUNING = "_finetooth_tuning"  # a model that is being tuned: its Tuning
PLAIN_VIEW = "_finetooth_plain_view"  # a layer that is being tuned: what is saved in its place
WHOLE = "_finetooth_whole"  # a half of a model that is split: the whole model
GATE = "_finetooth_gate"  # a gate, whose own variables are no weights of the model
IN_GATE = "_finetooth_in_gate"  # a layer that is behind a gate: a reference to the gate

# On optimizers and functions
GUARDED = "_finetooth_guarded"  # an optimizer that knows gates: what they remember of its state
SLOTS = "_finetooth_slots"  # an optimizer: the variables it had when its slots were found, and the slots
CHAIN = "_finetooth_chain"  # a function that stands in for a hooked method: the chain of hooks
