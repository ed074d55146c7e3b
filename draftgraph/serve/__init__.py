"""An OpenAI-compatible server: the API in this process, the models in another."""
