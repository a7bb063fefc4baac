"""Training networks on federated data: what is judged, who trains, and how the server combines it."""
