"""Use a lab as a learner does."""

from labkit.labs.panel import ExperimentPanel


def predict_and_run(lab: ExperimentPanel, prediction: str) -> str:
    """Type a prediction, press Predict and Run, and return the lab's message."""
    lab.answer.value = prediction
    lab.predict_button.click()
    lab.run_button.click()
    return lab.message.value
