"""The model of a run as an HTTP endpoint that speaks OpenAI's protocol."""
