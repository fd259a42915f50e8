"""An objective as a user would write it. Captured as user code, never imported by the tests."""

import numpy as np


def softmax(predictions, labels):
    shifted = np.exp(predictions - predictions.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    right = np.eye(predictions.shape[1])[labels.astype(int)]
    return probabilities - right, 2 * probabilities * (1 - probabilities)
