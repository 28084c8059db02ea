-- What people and other programs read and call with SQL: names that begin with `qdo_`, which stay from
-- version to version. `docs/sql.rst` explains them. A view gets further columns at its end; a format
-- that changes one in another way drops it. Views read their tables with the rights of the owner, and
-- call functions with those of the reader.

-- Return JSON; NULL for other bytes, such as an encrypted body, and for JSON that `jsonb` cannot hold.
CREATE OR REPLACE FUNCTION {schema}.json_of(data bytea) RETURNS jsonb
LANGUAGE plpgsql STABLE STRICT AS $$
BEGIN
    RETURN pg_catalog.convert_from(data, 'UTF8')::pg_catalog.jsonb;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$$;

-- Return a time of a node; NULL for other texts.
CREATE OR REPLACE FUNCTION {schema}.time_of(data text) RETURNS timestamptz
LANGUAGE plpgsql STABLE STRICT AS $$
BEGIN
    RETURN data::pg_catalog.timestamptz;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$$;

-- The nodes of apps that this schema coordinates, by their folder. Without the nodes of a coordinator
-- that an app has left.
CREATE OR REPLACE VIEW {schema}.nodes AS
SELECT apps.name AS app, apps.root
FROM {schema}.apps JOIN {schema}.znodes
    ON parent = regexp_replace(root, '/[^/]*$', '') COLLATE "C"
    AND znodes.name = regexp_replace(root, '^.*/', '') COLLATE "C"
WHERE split_part(fleet, ' ', 1) = to_hex(czxid) || '-' || to_hex(ctime);

-- The progress of each queue by its node; without one if another server coordinates the app.
CREATE OR REPLACE VIEW {schema}.progress AS
SELECT queues.id, queues.app, queues.name AS queue, trimmed, nodes.root, node.value,
    CASE WHEN nodes.root IS NOT NULL THEN greatest(trimmed,
        substring(node.value ->> 'last' FROM '^[0-9]{1,18}$')::bigint) END AS done
FROM {schema}.queues LEFT JOIN {schema}.nodes ON nodes.app = queues.app
LEFT JOIN LATERAL (
    SELECT {schema}.json_of(data) AS value FROM {schema}.znodes
    WHERE parent = nodes.root || '/queues' AND znodes.name = queues.name COLLATE "C"
    OFFSET 0  -- reads a node once
) AS node ON true;

-- What waits in each queue, and who processes it.
CREATE OR REPLACE VIEW {schema}.qdo_queues AS
SELECT app, progress.queue, value ->> 'owner' AS worker,
    CASE WHEN root IS NOT NULL THEN waiting.count END AS waiting,
    to_timestamp((waiting.first - 122192928000000000) / 1e7) AS waiting_since,
    value ? 'blocked' AS is_blocked,
    coalesce(value -> 'blocked', value -> 'failing') ->> 'error' AS error, done AS position
FROM {schema}.progress CROSS JOIN LATERAL (
    SELECT count(*) AS count, min(position) AS first FROM {schema}.messages
    WHERE messages.queue = progress.id AND position > done
) AS waiting;

-- The messages that are stored. Bodies are for readers who may read the table.
CREATE OR REPLACE VIEW {schema}.qdo_messages AS
SELECT app, progress.queue,
    coalesce(substring(messages.headers FROM '"qdo-id": ?"([^"\\]+)"'),
        lpad(to_hex(messages.position & 4294967295), 8, '0')
        || '-' || lpad(to_hex((messages.position >> 32) & 65535), 4, '0')
        || '-' || lpad(to_hex(((messages.position >> 48) & 4095) | 4096), 4, '0')
        || '-8000-' || lpad(to_hex(node), 12, '0')) AS id,
    CASE WHEN dead_at IS NOT NULL THEN 'failed' WHEN messages.position <= done THEN 'done'
        WHEN done IS NOT NULL THEN 'waiting' END AS state,
    to_timestamp((messages.position - 122192928000000000) / 1e7) AS stored_at,
    NULL::timestamptz AS due_at, messages.key,
    {schema}.json_of(convert_to(messages.headers, 'UTF8')) AS headers,
    CASE WHEN (SELECT has_table_privilege('{schema}.messages', 'SELECT'))
        THEN {schema}.json_of(messages.body) END AS body,
    octet_length(messages.body) AS bytes, messages.position
FROM {schema}.progress
JOIN {schema}.messages ON messages.queue = progress.id AND messages.position > trimmed
LEFT JOIN {schema}.dead_letters AS dead
    ON dead.queue = messages.queue AND dead.position = messages.position
CROSS JOIN {schema}.about
UNION ALL
SELECT delayed.app, queues.name, substring(headers FROM '"qdo-id": ?"([^"\\]+)"'), 'delayed', NULL,
    to_timestamp((least(due, 9e17) - 122192928000000000) / 1e7), key,
    {schema}.json_of(convert_to(headers, 'UTF8')),
    CASE WHEN (SELECT has_table_privilege('{schema}.messages', 'SELECT'))
        THEN {schema}.json_of(body) END, octet_length(body), NULL
FROM {schema}.delayed JOIN {schema}.queues ON queues.id = queue;

-- Find a message by the id that `send` returned: by the position in the id, or by its header.
CREATE OR REPLACE FUNCTION {schema}.qdo_message(of_id text) RETURNS SETOF {schema}.qdo_messages
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    hex text := substring(of_id FROM '^[0-9a-f]{8}-[0-9a-f]{4}-1[0-9a-f]{3}-8000-');
    place bigint := ('x0' || substring(hex FROM 16 FOR 3) || substring(hex FROM 10 FOR 4)
        || left(hex, 8))::bit(64)::bigint;
BEGIN
    RETURN QUERY SELECT * FROM {schema}.qdo_messages WHERE position = place AND id = of_id;
    IF NOT FOUND THEN
        RETURN QUERY SELECT * FROM {schema}.qdo_messages WHERE id = of_id;
    END IF;
END
$$;

-- Send a message when the transaction commits; return its id. As `app.send` with a connection.
CREATE OR REPLACE FUNCTION {schema}.qdo_send(
    app text, queue text, body jsonb, key text DEFAULT NULL, headers jsonb DEFAULT '{}',
    kind text DEFAULT NULL, delay interval DEFAULT NULL, dedup_key text DEFAULT NULL,
    dedup_for interval DEFAULT '5 minutes'
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    id text := gen_random_uuid();
    now float8 := extract(epoch FROM clock_timestamp());
    later float8 := extract(epoch FROM delay);
BEGIN
    IF jsonb_typeof(headers) <> 'object' OR EXISTS (
        SELECT FROM jsonb_each(headers) AS one(name, value)
        WHERE jsonb_typeof(one.value) <> 'string' OR one.name LIKE 'qdo-%'
    ) THEN
        RAISE EXCEPTION 'headers must be a JSON object of texts whose names do not begin with qdo-, got %',
            headers USING ERRCODE = 'invalid_parameter_value';
    END IF;
    headers := coalesce(headers, '{}') || jsonb_strip_nulls(jsonb_build_object('qdo-id', id, 'qdo-kind', kind,
        'qdo-sent', CASE WHEN later > 0 THEN to_char(now, 'FM9999999990.000000') END,
        'qdo-due', CASE WHEN later > 0 THEN to_char(now + later, 'FM9999999990.000000') END));
    PERFORM {schema}.stage((SELECT node FROM {schema}.about), app, ARRAY[queue], ARRAY[key],
        ARRAY[headers::text], ARRAY[convert_to(body::text, 'UTF8')], ARRAY[id],
        ARRAY[-(nullif(greatest(later, 0), 0) * 10000000)::bigint], ARRAY[dedup_key],
        ARRAY[(extract(epoch FROM dedup_for) * 10000000)::bigint]);
    RETURN id;
END
$$;

-- Requests as people read them. The next view has a branch for each state, which uses its index.
CREATE OR REPLACE VIEW {schema}.readable_requests AS
SELECT app, pool, id, priority, asker, to_timestamp(least(asked, 9e12)) AS asked_at,
    to_timestamp(least(due, 9e12)) AS due_at,
    to_timestamp(nullif(least(started, 9e12), 0)) AS started_at,
    CASE state WHEN 3 THEN to_timestamp(least(until - keep, 9e12)) END AS ended_at,
    nullif(owner, '') AS worker, take AS runs, failed AS failed_attempts, error, note,
    CASE WHEN (SELECT has_table_privilege('{schema}.requests', 'SELECT'))
        THEN {schema}.json_of(body) END AS body,
    CASE WHEN (SELECT has_table_privilege('{schema}.requests', 'SELECT'))
        THEN {schema}.json_of(result) END AS result,
    state AS state_number, outcome, parent,
    to_timestamp(nullif(least(deadline, 9e12), 0)) AS deadline_at
FROM {schema}.requests;

CREATE OR REPLACE VIEW {schema}.qdo_requests AS
SELECT 'waiting' AS state, * FROM {schema}.readable_requests WHERE state_number = 0
UNION ALL SELECT 'running', * FROM {schema}.readable_requests WHERE state_number = 1
UNION ALL SELECT 'paused', * FROM {schema}.readable_requests WHERE state_number = 2
UNION ALL SELECT 'failed', * FROM {schema}.readable_requests
    WHERE state_number = 3 AND outcome = 'failed' AND parent IS NULL
UNION ALL SELECT outcome, * FROM {schema}.readable_requests
    WHERE state_number = 3 AND outcome IS DISTINCT FROM 'failed' AND parent IS NULL
UNION ALL SELECT outcome, * FROM {schema}.readable_requests
    WHERE state_number = 3 AND parent IS NOT NULL;

-- What operators must decide: dead letters and failed requests.
CREATE OR REPLACE VIEW {schema}.qdo_failed AS
SELECT app, 'message' AS kind, name AS queue,
    coalesce(substring(headers FROM '"qdo-id": ?"([^"\\]+)"'),
        lpad(to_hex(position & 4294967295), 8, '0')
        || '-' || lpad(to_hex((position >> 32) & 65535), 4, '0')
        || '-' || lpad(to_hex(((position >> 48) & 4095) | 4096), 4, '0')
        || '-8000-' || lpad(to_hex(node), 12, '0')) AS id,
    to_timestamp(least(dead_at, 9e12)) AS failed_at, error, attempts, worker, key,
    CASE WHEN (SELECT has_table_privilege('{schema}.dead_letters', 'SELECT'))
        THEN {schema}.json_of(body) END AS body,
    CASE WHEN (SELECT has_table_privilege('{schema}.dead_letters', 'SELECT'))
        THEN traceback END AS traceback
FROM {schema}.dead_letters JOIN {schema}.queues ON queues.id = queue CROSS JOIN {schema}.about
UNION ALL
SELECT app, 'request', pool, id, ended_at, error, failed_attempts, worker, NULL, body, NULL
FROM {schema}.readable_requests
WHERE state_number = 3 AND outcome = 'failed' AND parent IS NULL;

CREATE OR REPLACE VIEW {schema}.qdo_timers AS
SELECT app, znodes.name AS timer, value ->> 'queue' AS queue, value ->> 'when' AS schedule,
    {schema}.time_of(value ->> 'last') AS last_at, {schema}.time_of(value ->> 'next') AS next_at,
    value ->> 'refused' AS error
FROM {schema}.nodes JOIN {schema}.znodes ON parent = root || '/timers'
CROSS JOIN LATERAL (SELECT {schema}.json_of(data) AS value OFFSET 0) AS node;

-- The worker processes with their last reports, and when their sessions were heard.
CREATE OR REPLACE VIEW {schema}.qdo_workers AS
SELECT app, value ->> 'worker' AS worker, value ->> 'host' AS host, value ->> 'version' AS version,
    value ->> 'state' AS state, heard AS heard_at,
    to_timestamp(jsonb_path_query_first(value, '$.started ? (@ > 0 && @ < 9e9)')::float8)
        AS started_at,
    jsonb_path_query_first(value, '$.queues ? (@ >= 0 && @ < 2e9)')::integer AS queues,
    jsonb_path_query_first(value, '$.busy ? (@ >= 0 && @ < 2e9)')::integer AS busy,
    jsonb_path_query_first(value, '$.processed ? (@ >= 0 && @ < 9e18)')::bigint AS processed,
    value AS report
FROM {schema}.nodes JOIN {schema}.znodes ON parent = root || '/components/worker'
CROSS JOIN LATERAL (SELECT {schema}.json_of(data) AS value OFFSET 0) AS node
LEFT JOIN {schema}.sessions ON sessions.id = znodes.owner;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC;
SELECT {schema}.add_partitions();
