"""A grid in memory, its nodes functions, its clock its own: for what no real federation can be made to do.

A node's answer to a message is a list of (seconds it takes, content or error code).
"""

from itertools import count

from flwr.app import Error, Message, Metadata

ERROR_OF_LINK = 3  # what a SuperLink answers in place of a client whose ttl has passed


class Clock:
    """Stands in for the loop's `time`: sleeping is what makes it pass."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class MemoryGrid:
    def __init__(self, nodes, clock, expires=True):
        self.nodes, self.clock, self.expires = dict(nodes), clock, expires
        self.ids, self.pushed, self.queue = count(), [], []
        self.refused, self.refusal = set(), []  # nodes that no message is taken for, and what is said instead of its id

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        taken = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in self.refused:
                taken += self.refusal
                continue
            identifier = f"message {next(self.ids)}"
            message.metadata.__dict__["_message_id"] = identifier
            self.pushed.append((self.clock.now, node, message))
            for seconds, answer in self.nodes[node](message):
                self.queue.append(self._reply(message, answer, seconds))
            if self.expires:
                self.queue.append(self._reply(message, ERROR_OF_LINK, message.metadata.ttl, src=1))
            taken.append(identifier)
        return taken

    def pull_messages(self, identifiers):
        """In no particular order, as Flower's."""
        due = [
            reply for reply in self.queue if reply.metadata.created_at <= self.clock.now and asked(reply, identifiers)
        ]
        self.queue = [reply for reply in self.queue if not any(reply is one for one in due)]
        return due[::-1]

    def _reply(self, message, answer, seconds, src=None):
        body = {"error": Error(answer, f"code {answer}")} if isinstance(answer, int) else {"content": answer}
        about = message.metadata
        times = {"created_at": self.clock.now + seconds, "ttl": 1.0}
        metadata = Metadata(
            1, "", src or about.dst_node_id, 1, about.message_id, "", message_type=about.message_type, **times
        )
        return Message(metadata=metadata, **body)


def asked(reply, identifiers):
    return reply.metadata.reply_to_message_id in identifiers
