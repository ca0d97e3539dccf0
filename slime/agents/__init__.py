"""Agents that call a model API: an endpoint for each sample, in front of the rollout's engines.

agent ─► chat_api, responses_api, messages_api ─► conversation ─► turns ─► generate ─► router
         (shapes of three protocols)              (messages to    (a tree)               │
                                                  tokens and back)                       ▼
                                                                                       engines
"""
