"""An objective as a user would write it. Captured as user code, never imported by the tests."""

import numpy as np

import penstock


def softmax(predictions, labels):
    shifted = np.exp(predictions - predictions.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    right = np.eye(predictions.shape[1])[labels.astype(int)]
    penstock.log("certain", probabilities.max(axis=1).mean())
    return probabilities - right, 2 * probabilities * (1 - probabilities)
