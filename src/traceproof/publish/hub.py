"""Pushing to a dataset on a hub: a pull request with one commit, found again on the next run."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.publish.bundle import Bundle
from traceproof.publish.change import Change
from traceproof.publish.connection import Connection, Revision
from traceproof.publish.push import Outcome, patiently, planned, unlike

PULL_REQUEST = re.compile(r"refs/pr/[1-9][0-9]*")
MAIN = "main"
OPEN = frozenset({"open", "draft"})


class Hub(Connection):
    """A dataset repository on a hub, and pull requests to it."""

    def push(self, bundle: Bundle, describe: Callable[[Change], str], *, allow_changes: bool) -> Outcome:
        """Open the bundle's pull request, or bring the one that is open up to date, and read it back.

        Raises TraceproofError: no write rights, a conflict with what is there, a server that gives up or that
        holds something else than it was sent.
        """
        self.say(f"{bundle.slug}: asking {self.endpoint} what {self.repository} holds")
        return patiently(
            lambda: self._attempt(bundle, describe, allow_changes=allow_changes), pause=self.pause, say=self.say
        )

    def _attempt(self, bundle: Bundle, describe: Callable[[Change], str], *, allow_changes: bool) -> Outcome:
        with self.errors(), tempfile.TemporaryDirectory() as scratch:
            main = Revision(self, MAIN, Path(scratch) / "main")
            change = planned(bundle, main, allow_changes=allow_changes)
            number = self._pull_request(bundle)
            self.say(f"{bundle.slug}: {len(change.files)} files differ from {self.repository}")
            if not change.files:
                return Outcome(f"{self.endpoint}/datasets/{self.repository}", main.revision, False, 0)  # noqa: FBT003
            if number is None:
                info = self._commit(
                    bundle, change.files, [], describe(change), parent=main.revision, revision=None
                )
                if info.pr_num is None:
                    raise TraceproofError(
                        f"{self.endpoint} made no commit: it says that it holds these files, but lists others",
                        problems=sorted(change.files),
                        todo="Ask the hub's operator; nothing was committed.",
                    )
                reference, committed = f"refs/pr/{info.pr_num}", True
            else:
                reference = f"refs/pr/{number}"
                committed = self._update(bundle, change, main, reference, describe(change))
            head = Revision(self, reference, Path(scratch) / "head")
            # By digest first: what is listed otherwise need not be downloaded.
            different = [
                f"{path}: listed otherwise" for path, data in change.files.items() if not head.holds(path, data)
            ]
            different = different or unlike(change.files, head.read)
        where = f"{self.endpoint}/datasets/{self.repository}/discussions/{reference.rpartition('/')[2]}"
        if different:
            raise TraceproofError(
                f"{where} does not hold what was sent: the server's copy differs",
                problems=different,
                todo="Do not merge it. Close it, and run again or ask the hub's operator.",
            )
        return Outcome(where, head.revision, committed, len(change.files))

    def _update(self, bundle: Bundle, change: Change, main: Revision, reference: str, text: str) -> bool:
        """One commit on an open pull request, if it holds anything else than the change; whether there was one."""
        with tempfile.TemporaryDirectory() as scratch:
            head = Revision(self, reference, Path(scratch))
            wrong = {path: data for path, data in change.files.items() if not head.holds(path, data)}
            stale = sorted(head.paths() - main.paths() - change.files.keys())
            if not wrong and not stale:
                return False
            self._commit(bundle, wrong, stale, text, parent=head.revision, revision=reference)
            return True

    def _commit(  # noqa: PLR0913 - one commit's worth
        self,
        bundle: Bundle,
        files: dict[str, bytes],
        gone: list[str],
        text: str,
        *,
        parent: str,
        revision: str | None,
    ) -> Any:  # noqa: ANN401 - the library's record
        """Commit to a new pull request (no revision) or to an open one's reference; never to anything else.

        Raises ValueError: the revision is a branch.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        if revision is not None and not PULL_REQUEST.fullmatch(revision):
            raise ValueError(f"{revision} is no pull request; nothing is ever pushed to a branch of the dataset")
        adds = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=data) for path, data in sorted(files.items())
        ]
        deletes = [CommitOperationDelete(path_in_repo=path) for path in gone]
        with self.answer("a commit"):
            return self.api.create_commit(
                self.repository,
                [*adds, *deletes],
                commit_message=bundle.title,
                commit_description=text,
                repo_type="dataset",
                revision=revision,
                create_pr=revision is None,
                parent_commit=parent,
            )

    def _pull_request(self, bundle: Bundle) -> int | None:
        """Number of the bundle's open pull request: one that the token's owner opened, and nobody else."""
        with self.answer("whose the token is"):
            me = str(self.api.whoami()["name"])
        with self.answer("pull requests"), self.watch.listing():
            found = self.api.get_repo_discussions(
                self.repository, repo_type="dataset", discussion_type="pull_request", author=me
            )
            for discussion in found:
                ours = discussion.title == bundle.title and discussion.author == me
                if not ours or discussion.status not in OPEN:
                    continue
                details = self.api.get_discussion_details(self.repository, discussion.num, repo_type="dataset")
                opening = [event for event in details.events if event.type == "comment"][:1]
                if any(event.author == me and _ends_with(event, bundle.marker) for event in opening):
                    return int(discussion.num)
        return None


def _ends_with(event: Any, marker: str) -> bool:  # noqa: ANN401 - the library's record
    """Whether the marker is a comment's last line: what stands above it may quote anything."""
    lines = str(getattr(event, "content", None) or "").split()
    return " ".join(lines[-2:]) == marker
