"""What a learner does with a lab."""

from labkit.labs.panel import ExperimentPanel


def predict_and_run(lab: ExperimentPanel, prediction: str) -> str:
    """Type a prediction, press Predict and Run; returns what the lab says."""
    lab.answer.value = prediction
    lab.predict_button.click()
    lab.run_button.click()
    return lab.message.value
