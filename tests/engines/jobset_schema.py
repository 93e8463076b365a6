"""A JSON schema of JobSet (jobset.x-k8s.io/v1alpha2), from its API reference.

Unknown fields are rejected, as by a server with strict field validation. Templates are
not described here: they are those of a Job.
"""


def _object(required=(), **fields):
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT, _BOOLEAN, _OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_NAMES = {"type": "array", "items": _TEXT}
_LABEL = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}  # of DNS


def _one_of(*words):
    return {"enum": list(words)}


_ACTION = _one_of(
    *("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    *("RestartJob", "RestartJobAndIgnoreMaxRestarts"),
)

SCHEMA = _object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_object(
        ["name"],
        name=_TEXT,
        namespace=_TEXT,
        labels={"type": "object", "additionalProperties": _TEXT},
        annotations={"type": "object", "additionalProperties": _TEXT},
    ),
    spec=_object(
        ["replicatedJobs"],
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ["name", "template"],
                name=_LABEL,
                groupName=_TEXT,
                replicas=_COUNT,
                template=_object(["spec"], metadata=_OBJECT, spec=_OBJECT),
                dependsOn={
                    "type": "array",
                    "items": _object(
                        ["name", "status"],
                        name=_TEXT,
                        status=_one_of("Ready", "Complete"),
                    ),
                },
            ),
        },
        network=_object(
            enableDNSHostnames=_BOOLEAN,
            subdomain=_LABEL,
            publishNotReadyAddresses=_BOOLEAN,
        ),
        successPolicy=_object(
            ["operator"], operator=_one_of("All", "Any"), targetReplicatedJobs=_NAMES
        ),
        failurePolicy=_object(
            maxRestarts=_COUNT,
            restartStrategy=_one_of("Recreate", "BlockingRecreate", "InPlaceRestart"),
            rules={
                "type": "array",
                "items": _object(
                    ["name", "action"],
                    name=_TEXT,
                    action=_ACTION,
                    onJobFailureReasons=_NAMES,
                    onJobFailureMessagePatterns=_NAMES,
                    targetReplicatedJobs=_NAMES,
                ),
            },
        ),
        startupPolicy=_object(
            ["startupPolicyOrder"], startupPolicyOrder=_one_of("AnyOrder", "InOrder")
        ),
        suspend=_BOOLEAN,
        coordinator=_object(
            ["replicatedJob"], replicatedJob=_TEXT, jobIndex=_COUNT, podIndex=_COUNT
        ),
        managedBy=_TEXT,
        ttlSecondsAfterFinished=_COUNT,
    ),
)
