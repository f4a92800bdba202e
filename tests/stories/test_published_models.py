"""Published models are tuned from beginning to end: a step equals plain Keras', files, patches and ways back are exact.

Nothing here is compared by finetooth's own means: variables are those of Keras, their bits are bytes.
"""

import keras
import numpy as np
import pytest
from models import PUBLISHED, VERSE, VOCABULARY, Published, characters

import finetooth as ft

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # what the models' own code warns about is not ours
]


def variables_of(model):
    """The weights, without the states of random numbers, which belong to no training."""
    return [v for v in model.variables if "seed" not in v.name]


def arrays(variables):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def bytes_of(variables):
    return [array.tobytes() for array in arrays(variables)]


def masks_of(published, variables):
    """Where the part is in each variable, by NumPy's own indexing."""
    masks = [np.zeros(v.shape, bool) for v in variables]
    for mask, variable in zip(masks, variables):
        index = published.index_of(variable)
        if index is not None:
            mask[index] = True
    return masks


def plain_step(published, x, y):
    """The weights after one step of SGD in plain Keras, which can freeze whole layers: those without any of the part.

    A normalisation that is frozen uses its statistics, as it does in a tuned model.
    """
    model = published.make()
    for layer in model._flatten_layers():
        layer.trainable = any(published.index_of(v) is not None for v in layer.variables)
    one_step(model, published, x, y)
    return arrays(variables_of(model))


def one_step(model, published, x, y):
    model.compile(keras.optimizers.SGD(0.1), published.loss)
    model.train_on_batch(x, y)


def check_step(before, after, plain, masks, statistics):
    """The part is where plain Keras takes it, and not a bit differs elsewhere."""
    moved = 0
    for old, new, wanted, mask, free in zip(before, after, plain, masks, statistics):
        inside = np.ones_like(mask) if free else mask
        assert old[~inside].tobytes() == new[~inside].tobytes()
        if inside.any():
            step = wanted[inside] - old[inside]
            rounding = np.finfo(old.dtype).eps * np.abs(old[inside]).max()
            tolerance = 1e-3 * np.abs(step).max() + 4 * rounding
            np.testing.assert_allclose(new[inside] - old[inside], step, rtol=1e-3, atol=tolerance)
            moved += np.abs(step).max() > 20 * tolerance
    assert moved >= masks_with_elements(masks) / 2


def masks_with_elements(masks):
    return sum(mask.any() for mask in masks)


def check_files(model, published, tuned, folder):
    """Files written while the model is tuned hold its merged weights, for plain Keras."""
    model.save(folder / "model.keras")
    custom = {"AttentionWeightedAverage": type(model.get_layer("attention"))} if "attention" in names(model) else {}
    loaded = keras.saving.load_model(folder / "model.keras", compile=False, custom_objects=custom)
    assert bytes_of(variables_of(loaded)) == tuned
    model.save_weights(folder / "model.weights.h5")
    fresh = published.make()
    fresh.load_weights(folder / "model.weights.h5")
    assert bytes_of(variables_of(fresh)) == tuned


def names(model):
    return {layer.name for layer in model.layers}


def generated(model, published):
    """What the model writes, compiled anew or as it was."""
    return np.array(model.generate(published.prompt(), stop_token_ids=None)["token_ids"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_tuned_from_beginning_to_end(name, tmp_path):
    published: Published = PUBLISHED[name]
    x, y = published.data()
    moving = published.options.get("statistics") == "update"
    plain = plain_step(published, x, y)

    model = published.make()
    variables = variables_of(model)
    trainable = [v.path for v in model.trainable_variables]
    masks = masks_of(published, variables)
    statistics = [moving and "moving_" in v.path for v in variables]
    before, start = arrays(variables), bytes_of(variables)
    part = ft.select(model, *((v, published.index_of(v)) for v in variables if published.index_of(v) is not None))
    assert part.size == sum(mask.sum() for mask in masks)

    tuning = ft.tune(model, part, **published.options)
    one_step(model, published, x, y)
    check_step(before, arrays(variables), plain, masks, statistics)

    model.compile(keras.optimizers.AdamW(1e-2, weight_decay=0.1), published.loss)
    model.fit(x, y, epochs=3, verbose=0)
    trained = model.predict(x, verbose=0)
    tuned = bytes_of(variables)
    check_files(model, published, tuned, tmp_path)
    tuning.finish()

    assert tuning.verify()
    assert bytes_of(variables) == tuned and [v.path for v in model.trainable_variables] == trainable
    np.testing.assert_allclose(model.predict(x, verbose=0), trained, rtol=1e-4, atol=1e-5)
    for old, new, mask, free in zip(before, arrays(variables), masks, statistics):
        assert free or old[~mask].tobytes() == new[~mask].tobytes()
        assert (old != new)[mask].mean() > 0.1 or not mask.any()  # of a table, the rows of the words in the batch

    fresh = published.make()
    tuning.patch.apply(fresh)
    assert bytes_of(variables_of(fresh)) == tuned
    tuning.patch.revert(model)
    assert bytes_of(variables) == start


@pytest.mark.parametrize("name", [name for name, published in PUBLISHED.items() if published.prompt])
def test_a_language_model_writes_what_its_weights_say(name):
    """`generate` keeps what it has compiled. It must not write with weights that are gone."""
    published = PUBLISHED[name]
    x, y = published.data()
    model = published.make()
    model.compile(keras.optimizers.Adam(3e-2), published.loss, sampler="greedy")
    untrained = generated(model, published)
    tuning = ft.tune(model, "**/embeddings[:50]")
    model.fit(x, y, epochs=5, verbose=0)
    inside = generated(model, published)

    other = published.make()
    tuning.patch.apply(other)
    other.compile(sampler="greedy")
    expected = generated(other, published)
    assert (expected != untrained).any()
    np.testing.assert_array_equal(inside, expected)
    tuning.finish()
    np.testing.assert_array_equal(generated(model, published), expected)
    tuning.patch.revert(model)
    model.compile(sampler="greedy")
    np.testing.assert_array_equal(generated(model, published), untrained)


def test_ended_without_a_new_compile_a_model_does_not_write_with_the_part():
    """`revert` puts the weights back. What was compiled while they were others is not used again."""
    published = PUBLISHED["gpt2"]
    x, y = published.data()
    model = published.make()
    model.compile(keras.optimizers.Adam(3e-2), published.loss, sampler="greedy")
    untrained = generated(model, published)
    tuning = ft.tune(model, "**/token_embedding/embeddings[:50]")
    model.fit(x, y, epochs=5, verbose=0)
    assert (generated(model, published) != untrained).any()
    tuning.revert()
    np.testing.assert_array_equal(generated(model, published), untrained)


def likely(model, text, length):
    """Continue a text by the most likely characters."""
    characters_of = {code: character for character, code in VOCABULARY.items()}
    for _ in range(length):
        codes = [VOCABULARY[character] for character in text[-40:]]
        odds = np.array(model.predict(np.array([[0] * (40 - len(codes)) + codes]), verbose=0))[0]
        text += characters_of[int(odds[1:].argmax()) + 1]
    return text


def test_trained_weights_are_read_as_they_were_meant():
    """What the published weights know shows: English is likelier than noise, and likelier after tuning on a verse."""
    published = PUBLISHED["textgenrnn"]
    model = published.make()
    x, y = characters()
    model.compile("adam", published.loss)
    noise = np.random.default_rng(0).permutation(y)
    base = model.evaluate(x, y, verbose=0)
    assert base < 3 and model.evaluate(x, noise, verbose=0) > base + 1
    with ft.tune(model, "output/kernel[:, :50]", "output/bias") as tuning:
        model.compile(keras.optimizers.Adam(1e-3), published.loss)
        model.fit(x, y, epochs=30, batch_size=32, verbose=0)
    model.compile("adam", published.loss)
    assert model.evaluate(x, y, verbose=0) < base - 0.5
    print(likely(model, VERSE[:20], 20))
    tuning.patch.revert(model)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(base, rel=1e-6)
