CREATE SCHEMA IF NOT EXISTS qdo;
DO $$
DECLARE
    stranger text := (SELECT pg_get_userbyid(nspowner) FROM pg_namespace
        WHERE nspname = 'qdo' AND pg_get_userbyid(nspowner) <> current_user);
BEGIN
    IF stranger IS NOT NULL THEN
        RAISE EXCEPTION 'schema qdo must belong to %, got %', current_user, stranger
            USING ERRCODE = 'QD003', DETAIL = stranger, HINT = 'Drop it, or run this as its owner.';
    END IF;
END
$$;
REVOKE ALL ON SCHEMA qdo FROM PUBLIC;
CREATE TABLE qdo.about (
    id integer PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    format integer NOT NULL,
    oldest integer NOT NULL,
    tables text NOT NULL,
    functions text NOT NULL,
    node bigint NOT NULL,
    partition_ticks bigint NOT NULL CHECK (partition_ticks > 0)
);
CREATE TABLE qdo.apps (
    name text PRIMARY KEY CHECK (length(name) <= 200),
    max_queues integer NOT NULL DEFAULT 100000,
    fleet text CHECK (length(fleet) <= 200),
    root text COLLATE "C" CHECK (octet_length(root) <= 65536)
);
CREATE TABLE qdo.queues (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    name text NOT NULL CONSTRAINT queue_name CHECK (
        length(name) <= 200 AND name NOT IN ('.', '..', 'zookeeper')
        AND name ~ '^[^/\u0001-\u001f\u007f-\u009f\ue000-\uf8ff\ufff0-\U0010ffff]+$'),
    trimmed bigint NOT NULL DEFAULT 0,
    largest integer NOT NULL DEFAULT 4096,
    xid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    root bigint,
    UNIQUE (app, name)
) WITH (fillfactor = 70);
CREATE INDEX queues_by_xid ON qdo.queues (xid);
CREATE TABLE qdo.messages (
    queue bigint NOT NULL,
    position bigint NOT NULL,
    xid bigint NOT NULL,
    key text,
    headers text,
    body bytea NOT NULL,
    PRIMARY KEY (queue, position)
) PARTITION BY RANGE (position);
CREATE INDEX messages_by_xid ON qdo.messages (xid, queue);
CREATE SEQUENCE qdo.positions;
CREATE TABLE qdo.position_lock ();
CREATE TABLE qdo.outgoing (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    xid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    app text NOT NULL,
    name text NOT NULL,
    key text CHECK (length(key) <= 1000),
    headers text CHECK (octet_length(headers) <= 131072),
    body bytea NOT NULL CHECK (octet_length(body) <= 67108864),
    id text NOT NULL,
    due bigint,
    dedup_key text,
    dedup_ticks bigint
);
CREATE INDEX outgoing_by_xid ON qdo.outgoing (xid);
CREATE TABLE qdo.delayed (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    due bigint NOT NULL,
    queue bigint NOT NULL,
    key text CHECK (length(key) <= 1000),
    headers text CHECK (octet_length(headers) <= 131072),
    body bytea NOT NULL CHECK (octet_length(body) <= 67108864)
);
CREATE INDEX delayed_by_due ON qdo.delayed (app, due, number);
CREATE INDEX delayed_by_queue ON qdo.delayed (queue);
CREATE TABLE qdo.dedup (
    queue bigint NOT NULL,
    key bytea NOT NULL,
    id text NOT NULL,
    until bigint NOT NULL,
    PRIMARY KEY (queue, key)
);
CREATE INDEX dedup_by_until ON qdo.dedup (until);
CREATE TABLE qdo.dead_letters (
    queue bigint NOT NULL,
    position bigint NOT NULL,
    body bytea NOT NULL,
    key text,
    headers text,
    error text NOT NULL,
    traceback text NOT NULL,
    attempts integer NOT NULL,
    worker text NOT NULL,
    fence bigint NOT NULL,
    dead_at double precision NOT NULL,
    PRIMARY KEY (queue, position)
);
CREATE INDEX dead_letters_by_time ON qdo.dead_letters (dead_at, position);
CREATE INDEX dead_letters_failed_at ON qdo.dead_letters (to_timestamp(least(dead_at, 9e12)));
INSERT INTO qdo.about (format, oldest, tables, functions, node, partition_ticks) VALUES (
    1, 1, '', '', (floor(random() * 281474976710656))::bigint | 1099511627776, 3600::bigint * 10000000);
CREATE TABLE qdo.requests (
    app text NOT NULL,
    id text NOT NULL CHECK (length(id) <= 200),
    number bigint GENERATED ALWAYS AS IDENTITY,
    pool text NOT NULL CONSTRAINT pool_name CHECK (
        length(pool) <= 200 AND pool NOT IN ('.', '..', 'zookeeper')
        AND pool ~ '^[^/\u0001-\u001f\u007f-\u009f\ue000-\uf8ff\ufff0-\U0010ffff]+$'),
    priority integer NOT NULL CHECK (priority BETWEEN 0 AND 9),
    asked float8 NOT NULL,
    due float8 NOT NULL CHECK (due < 'Infinity'),
    state smallint NOT NULL DEFAULT 0,
    owner text NOT NULL DEFAULT '',
    take integer NOT NULL DEFAULT 0,
    failed integer NOT NULL DEFAULT 0,
    crashed boolean NOT NULL DEFAULT false,
    started float8 NOT NULL DEFAULT 0,
    note text,
    error text,
    mark text CHECK (octet_length(mark) <= 1048576),
    reply text CHECK (octet_length(reply) <= 1048576),
    digest bytea NOT NULL CHECK (octet_length(digest) <= 64),
    keep float8 NOT NULL CHECK (keep < 'Infinity'),
    headers text CHECK (octet_length(headers) <= 131072),
    body bytea CHECK (octet_length(body) <= 67108864),
    outcome text,
    result_headers text CHECK (octet_length(result_headers) <= 131072),
    result bytea CHECK (octet_length(result) <= 67108864),
    until float8 NOT NULL DEFAULT 0,
    asker text NOT NULL DEFAULT session_user,
    parent text CHECK (length(parent) <= 200),
    deadline float8 NOT NULL DEFAULT 0 CHECK (deadline < 'Infinity'),
    PRIMARY KEY (id, app)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02,
    toast.autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX requests_waiting ON qdo.requests (app, pool, priority, number, due) WHERE state = 0;
CREATE INDEX requests_delayed ON qdo.requests (app, pool, due) WHERE state = 0 AND due > asked;
CREATE INDEX requests_owned ON qdo.requests (app, owner, started) WHERE state IN (1, 2);
CREATE INDEX requests_over ON qdo.requests (app, until)
    WHERE state = 3 AND outcome IS DISTINCT FROM 'failed' AND parent IS NULL;
CREATE INDEX requests_failed ON qdo.requests (app, pool, number)
    WHERE state = 3 AND outcome = 'failed' AND parent IS NULL;
CREATE INDEX requests_steps ON qdo.requests (app, parent) WHERE parent IS NOT NULL;
CREATE INDEX requests_late ON qdo.requests (app, deadline) WHERE deadline > 0 AND state < 3;
CREATE TABLE qdo.pools (app text NOT NULL, name text NOT NULL);
CREATE INDEX pools_named ON qdo.pools (app, name);
CREATE TABLE qdo.streams (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    stream text NOT NULL,
    queue text NOT NULL,
    low text COLLATE "C" NOT NULL,
    high text COLLATE "C" NOT NULL,
    parents text[] NOT NULL,
    end_position bigint,
    hidden boolean NOT NULL,
    is_first boolean,
    UNIQUE (app, queue)
);
CREATE INDEX streams_by_name ON qdo.streams (app, stream);
CREATE INDEX streams_open ON qdo.streams (app, stream, low, queue) WHERE end_position IS NULL;
CREATE INDEX streams_hidden ON qdo.streams (app) WHERE hidden;
CREATE UNIQUE INDEX streams_once ON qdo.streams (app, stream) WHERE is_first;
CREATE TABLE qdo.tree (
    id integer PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    server text NOT NULL DEFAULT ''
);
CREATE TABLE qdo.znodes (
    parent text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    data bytea,
    acl text,
    czxid bigint NOT NULL,
    mzxid bigint NOT NULL,
    pzxid bigint NOT NULL,
    ctime bigint NOT NULL,
    mtime bigint NOT NULL,
    version bigint NOT NULL,
    creates bigint NOT NULL,
    aversion bigint NOT NULL,
    owner bigint NOT NULL,
    children integer NOT NULL,
    PRIMARY KEY (parent, name)
) WITH (fillfactor = 60);
CREATE INDEX znodes_owned ON qdo.znodes (owner) WHERE owner <> 0;
CREATE TABLE qdo.sessions (
    id bigint PRIMARY KEY,
    password bytea NOT NULL,
    timeout integer NOT NULL,
    generation integer NOT NULL,
    age text NOT NULL,
    beats bigint NOT NULL DEFAULT 0,
    heard timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 20);
CREATE TABLE qdo.changes (
    zxid bigint PRIMARY KEY,
    events text NOT NULL
);
INSERT INTO qdo.tree DEFAULT VALUES;
INSERT INTO qdo.changes VALUES (0, '[]');
INSERT INTO qdo.znodes VALUES ('/', '', '', NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
DO $$
DECLARE
    bound text[];
BEGIN
    FOREACH bound SLICE 1 IN ARRAY ARRAY[
        ['apps', '', 'max_queues'],
        ['queues', 'length(app) <= 200', 'trimmed, largest, xid, root'],
        ['outgoing', 'length(app) <= 200 AND length(name) <= 200 AND length(id) <= 200'
            ' AND length(dedup_key) <= 1000', 'due, dedup_ticks, xid'],
        ['delayed', 'length(app) <= 200', 'due, queue'],
        ['dedup', 'length(id) <= 200 AND octet_length(key) <= 64', 'queue, until'],
        ['dead_letters', 'octet_length(body) <= 67108864 AND length(key) <= 1000'
            ' AND octet_length(headers) <= 131072 AND octet_length(error) <= 1048576'
            ' AND octet_length(traceback) <= 1048576 AND length(worker) <= 1000',
            'queue, position, attempts, fence, dead_at'],
        ['pools', 'length(app) <= 200 AND length(name) <= 200', ''],
        ['requests', 'length(app) <= 200 AND length(asker) <= 200'
            ' AND length(owner) <= 1000 AND length(outcome) <= 200'
            ' AND octet_length(note) <= 1048576 AND octet_length(error) <= 1048576',
            'asked, due, state, take, failed, started, keep, until, deadline'],
        ['streams', 'length(app) <= 200 AND length(stream) <= 200 AND length(queue) <= 200'
            ' AND length(low) <= 16 AND length(high) <= 16'
            ' AND cardinality(parents) <= 4096', 'end_position'],
        ['tree', 'length(server) <= 1000', ''],
        ['znodes', 'octet_length(parent) <= 65536 AND octet_length(name) <= 65536'
            ' AND octet_length(data) <= 1048576 AND octet_length(acl) <= 4194304'
            ' AND least(version, creates, aversion, children) >= -2147483648'
            ' AND greatest(version, creates, aversion, children) < 2147483648',
            'czxid, mzxid, pzxid, ctime, mtime'],
        ['sessions', 'length(age) <= 1000 AND octet_length(password) <= 64'
            ' AND timeout BETWEEN 200 AND 600000', 'generation, beats'],
        ['changes', 'octet_length(events) <= 67108864', 'zxid']
    ] LOOP
        EXECUTE format('ALTER TABLE qdo.%I ADD CONSTRAINT bounds CHECK (%s)', bound[1],
            concat_ws(' AND ', nullif(bound[2], ''), CASE WHEN bound[3] <> '' THEN format(
                'least(%1$s) >= 0 AND greatest(%1$s) < 4611686018427387904', bound[3]) END));
    END LOOP;
END
$$;
CREATE OR REPLACE FUNCTION qdo.clock() RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (extract(epoch FROM clock_timestamp()) * 10000000)::bigint + 122192928000000000;
END
$$;
CREATE OR REPLACE FUNCTION qdo.reserve(count bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    first bigint;
BEGIN
    LOCK TABLE qdo.position_lock IN EXCLUSIVE MODE;
    SELECT greatest(last_value + 1, qdo.clock()) INTO first FROM qdo.positions;
    PERFORM setval('qdo.positions', first + count - 1);
    RAISE EXCEPTION 'reserved' USING ERRCODE = 'QD000';
EXCEPTION WHEN SQLSTATE 'QD000' THEN
    RETURN first;
END
$$;
CREATE OR REPLACE FUNCTION qdo.add_partition(place bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    ticks bigint := (SELECT partition_ticks FROM qdo.about);
    number bigint := place / ticks;
    known regclass := to_regclass('qdo.messages_' || number);
BEGIN
    IF known IS NOT NULL THEN
        PERFORM pg_relation_size(known, 'init');
        RETURN;
    END IF;
    LOCK TABLE ONLY qdo.messages IN SHARE UPDATE EXCLUSIVE MODE;
    IF to_regclass('qdo.messages_' || number) IS NOT NULL THEN
        RETURN;
    END IF;
    EXECUTE format('CREATE TABLE qdo.messages_%s (LIKE qdo.messages INCLUDING ALL)'
        ' WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)', number);
    EXECUTE format('ALTER TABLE qdo.messages ATTACH PARTITION qdo.messages_%s'
        ' FOR VALUES FROM (%s) TO (%s)', number, number * ticks, (number + 1) * ticks);
END
$$;
CREATE OR REPLACE FUNCTION qdo.add_partitions() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms' AS $$
DECLARE
    ticks bigint := (SELECT partition_ticks FROM qdo.about);
BEGIN
    FOR further IN 0 .. 2 LOOP
        PERFORM qdo.add_partition(qdo.clock() + further * ticks);
    END LOOP;
EXCEPTION WHEN lock_not_available THEN
END
$$;
CREATE OR REPLACE FUNCTION qdo.tidy(since bigint, OUT upto bigint, OUT is_rest boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    latest bigint := qdo.clock() - 600000000;
BEGIN
    PERFORM qdo.add_partitions();
    WITH gone AS (
        DELETE FROM qdo.dedup WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM qdo.dedup WHERE until >= since AND until <= latest
            ORDER BY until LIMIT 10000 FOR UPDATE SKIP LOCKED))
        RETURNING until
    ) SELECT max(until), count(*) = 10000 INTO upto, is_rest FROM gone;
    upto := CASE WHEN is_rest THEN upto ELSE latest END;
END
$$;
CREATE OR REPLACE FUNCTION qdo.spans(after bigint) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    ticks bigint := (SELECT partition_ticks FROM qdo.about);
BEGIN
    RETURN QUERY SELECT (max(number) + 1) * ticks - 1 FROM (
        SELECT number, row_number() OVER (ORDER BY number) - 1 AS place FROM (
            SELECT substring(relname FROM '[0-9]+$')::bigint AS number
            FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
            WHERE inhparent = 'qdo.messages'::regclass
        ) AS parts WHERE (number + 1) * ticks > after
    ) AS placed GROUP BY place / 50 ORDER BY 1;
END
$$;
CREATE OR REPLACE FUNCTION qdo.count_messages(
    of_queue bigint, after bigint, upto bigint, OUT total bigint, OUT top bigint
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    span bigint;
    found bigint;
    last bigint;
BEGIN
    total := 0;
    FOR span IN SELECT qdo.spans(after) LOOP
        EXIT WHEN after >= upto;
        BEGIN
            SELECT count(*), max(position) INTO found, last FROM qdo.messages
                WHERE queue = of_queue AND position > after AND position <= least(span, upto);
            RAISE EXCEPTION 'counted' USING ERRCODE = 'QD000';
        EXCEPTION WHEN SQLSTATE 'QD000' THEN
            total := total + found;
            top := coalesce(last, top);
            after := span;
        END;
    END LOOP;
END
$$;
CREATE OR REPLACE FUNCTION qdo.limit_queues(of_app text, most integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF most IS DISTINCT FROM (SELECT max_queues FROM qdo.apps WHERE name = of_app) THEN
        INSERT INTO qdo.apps (name, max_queues) VALUES (of_app, most)
            ON CONFLICT (name) DO UPDATE SET max_queues = excluded.max_queues;
    END IF;
END
$$;
CREATE OR REPLACE FUNCTION qdo.claim_app(of_app text, of_fleet text, of_root text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known text := (SELECT fleet FROM qdo.apps WHERE name = of_app);
BEGIN
    IF known IS NULL THEN
        INSERT INTO qdo.apps (name, fleet, root) VALUES (of_app, of_fleet, of_root)
            ON CONFLICT (name) DO UPDATE SET fleet = coalesce(apps.fleet, excluded.fleet),
                root = CASE WHEN apps.fleet IS NULL THEN excluded.root ELSE apps.root END
            RETURNING fleet INTO known;
    END IF;
    RETURN known;
END
$$;
CREATE OR REPLACE FUNCTION qdo.limit_idle(role regrole) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_db_role_setting WHERE setrole = role
            AND setconfig::text LIKE '%idle_in_transaction_session_timeout=%') THEN
        EXECUTE format('ALTER ROLE %s SET idle_in_transaction_session_timeout = 600000', role);
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    RAISE WARNING 'set idle_in_transaction_session_timeout for % as a role that may alter it', role;
END
$$;
CREATE OR REPLACE FUNCTION qdo.message_id(place bigint) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT lpad(to_hex(place & 4294967295), 8, '0')
        || '-' || lpad(to_hex((place >> 32) & 65535), 4, '0')
        || '-' || lpad(to_hex(((place >> 48) & 4095) | 4096), 4, '0')
        || '-8000-' || lpad(to_hex(node), 12, '0') FROM qdo.about
$$;
CREATE OR REPLACE FUNCTION qdo.stage(
    of_node bigint, of_app text, names text[], keys text[], headers text[], bodies bytea[], ids text[],
    dues bigint[], dedup_keys text[], dedup_ticks bigint[]
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM qdo.about WHERE node = of_node) THEN
        RAISE EXCEPTION 'another schema' USING ERRCODE = 'QD002';
    END IF;
    INSERT INTO qdo.outgoing
        (app, name, key, headers, body, id, due, dedup_key, dedup_ticks)
        SELECT of_app, name, key, head, body, id,
            CASE WHEN due < 0 THEN qdo.clock() - due ELSE due END, dedup_key, ticks
        FROM unnest(names, keys, stage.headers, bodies, ids, dues, dedup_keys, stage.dedup_ticks)
            AS given(name, key, head, body, id, due, dedup_key, ticks);
END
$$;
CREATE OR REPLACE FUNCTION qdo.send_staged() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    own_xid bigint := pg_current_xact_id()::text::bigint;
    sending record;
BEGIN
    IF NOT EXISTS (SELECT FROM qdo.outgoing WHERE number = NEW.number) THEN
        RETURN NULL;
    END IF;
    FOR sending IN
        SELECT app, array_agg(name) AS names
        FROM qdo.outgoing WHERE xid = own_xid GROUP BY app ORDER BY app
    LOOP
        PERFORM qdo.lock_queues(sending.app, sending.names, NULL);
    END LOOP;
    FOR sending IN
        SELECT app, array_agg(name ORDER BY number) AS names,
            array_agg(key ORDER BY number) AS keys, array_agg(headers ORDER BY number) AS headers,
            array_agg(body ORDER BY number) AS bodies, array_agg(id ORDER BY number) AS ids,
            array_agg(due ORDER BY number) AS dues,
            array_agg(dedup_key ORDER BY number) AS dedup_keys,
            array_agg(dedup_ticks ORDER BY number) AS dedup_ticks
        FROM qdo.outgoing WHERE xid = own_xid GROUP BY app ORDER BY app
    LOOP
        PERFORM qdo.send(sending.app, sending.names, sending.keys, sending.headers,
            sending.bodies, sending.ids, sending.dues, sending.dedup_keys, sending.dedup_ticks,
            NULL);
        PERFORM FROM qdo.apps WHERE name = sending.app FOR NO KEY UPDATE SKIP LOCKED;
        IF FOUND OR NOT EXISTS (SELECT FROM qdo.apps WHERE name = sending.app) THEN
            PERFORM pg_notify(qdo.channel(sending.app), 'again');
        END IF;
    END LOOP;
    DELETE FROM qdo.outgoing WHERE xid = own_xid;
    RETURN NULL;
END
$$;
DROP TRIGGER IF EXISTS send_staged ON qdo.outgoing;
CREATE CONSTRAINT TRIGGER send_staged AFTER INSERT ON qdo.outgoing
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION qdo.send_staged();
ALTER TABLE qdo.outgoing ENABLE ALWAYS TRIGGER send_staged;
CREATE OR REPLACE FUNCTION qdo.channel(of_app text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN 'qdo_' || md5((SELECT node FROM qdo.about) || of_app);
END
$$;
CREATE OR REPLACE FUNCTION qdo.move_due(of_app text, most integer, most_bytes bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms' AS $$
DECLARE
    now bigint := qdo.clock();
    locked bigint[] := ARRAY[]::bigint[];
    asked bigint[];
    free bigint[];
    chosen bigint[];
    names text[];
    keys text[];
    heads text[];
    bodies bytea[];
BEGIN
    PERFORM FROM qdo.delayed WHERE number = (
        SELECT number FROM qdo.delayed WHERE app = of_app AND due <= now
        ORDER BY due, number LIMIT 1) FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    LOOP
        SELECT array_agg(DISTINCT queue) INTO asked FROM (
            SELECT queue FROM qdo.delayed
            WHERE app = of_app AND due <= now AND queue <> ALL (locked)
            ORDER BY due, number LIMIT most) AS due;
        IF asked IS NULL OR cardinality(locked) > most THEN
            free := ARRAY[locked[1 + floor(random() * cardinality(locked))]];
            PERFORM FROM qdo.queues WHERE id = ANY (free) FOR NO KEY UPDATE;
            EXIT;
        END IF;
        WITH goals AS (
            SELECT id, id AS goal FROM qdo.queues WHERE id = ANY (asked)
            UNION SELECT queues.id, heirs.id FROM qdo.queues
                JOIN qdo.streams AS own ON own.app = of_app AND own.queue = queues.name
                JOIN qdo.streams AS open ON open.app = of_app AND open.stream = own.stream
                JOIN qdo.queues AS heirs ON heirs.app = of_app AND heirs.name = open.queue
                WHERE queues.id = ANY (asked) AND own.end_position IS NOT NULL
                    AND open.end_position IS NULL
        ), got AS (
            SELECT id FROM qdo.queues WHERE id IN (SELECT goal FROM goals)
            ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
        ) SELECT array_agg(id) INTO free FROM (
            SELECT goals.id FROM goals LEFT JOIN got ON got.id = goal
            GROUP BY goals.id HAVING bool_and(got.id IS NOT NULL)) AS found;
        EXIT WHEN free IS NOT NULL;
        locked := locked || asked;
    END LOOP;
    SELECT array_agg(number) INTO chosen FROM (
        SELECT number, sum(size) OVER (ORDER BY due, number) - size AS before FROM (
            SELECT number, due, octet_length(body) + coalesce(octet_length(headers), 0) AS size
            FROM qdo.delayed WHERE app = of_app AND due <= now AND queue = ANY (free)
            ORDER BY due, number LIMIT most
        ) AS due
    ) AS sized WHERE before < most_bytes;
    WITH gone AS (DELETE FROM qdo.delayed WHERE number = ANY (chosen) RETURNING *)
    SELECT array_agg(queues.name ORDER BY due, number), array_agg(key ORDER BY due, number),
        array_agg(headers ORDER BY due, number), array_agg(body ORDER BY due, number)
        INTO names, keys, heads, bodies
        FROM gone JOIN qdo.queues ON queues.id = queue;
    IF names IS NOT NULL THEN
        PERFORM qdo.deliver(of_app, names, keys, heads, bodies);
    END IF;
    RETURN coalesce(cardinality(names), 0);
END
$$;
CREATE OR REPLACE FUNCTION qdo.deliver(
    of_app text, names text[], keys text[], heads text[], bodies bytea[]
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    half integer := cardinality(names) / 2;
BEGIN
    PERFORM qdo.append(of_app, names, keys, heads, bodies, NULL);
EXCEPTION WHEN OTHERS THEN
    IF SQLSTATE !~ '^(22|23|QD)' THEN
        RAISE;
    END IF;
    IF half > 0 THEN
        PERFORM qdo.deliver(of_app, names[:half], keys[:half], heads[:half], bodies[:half]);
        PERFORM qdo.deliver(of_app, names[half + 1:], keys[half + 1:], heads[half + 1:],
            bodies[half + 1:]);
        RETURN;
    END IF;
    INSERT INTO qdo.dead_letters
        SELECT id, qdo.reserve(1), bodies[1], keys[1], heads[1],
            'refused when it was due: ' || SQLERRM, '', 0, '', 0, qdo.unix_time()
        FROM qdo.queues WHERE app = of_app AND name = names[1];
    RAISE WARNING 'a delayed message of queue % is a dead letter now: it was refused when it was due: %',
        names[1], SQLERRM USING ERRCODE = 'QD008';
END
$$;
CREATE OR REPLACE FUNCTION qdo.look(
    of_app text, seen_next bigint, seen_running bigint[], since bigint,
    OUT next_xid bigint, OUT running bigint[], OUT names text[], OUT due_ticks bigint,
    OUT last_position bigint, OUT log_end bigint
)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    span bigint;
    found bigint[];
    changed bigint[] := ARRAY[]::bigint[];
BEGIN
    next_xid := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
    FOR span IN SELECT qdo.spans(since) LOOP
        BEGIN
            found := ARRAY(
                SELECT queue FROM qdo.messages
                    WHERE messages.xid >= seen_next AND messages.xid < next_xid
                    AND position > since AND position <= span
                UNION SELECT queue FROM qdo.messages
                    WHERE messages.xid = ANY (seen_running)
                    AND position > since AND position <= span);
            RAISE EXCEPTION 'looked' USING ERRCODE = 'QD000';
        EXCEPTION WHEN SQLSTATE 'QD000' THEN
            changed := changed || found;
            since := span;
        END;
    END LOOP;
    SELECT ARRAY(SELECT pg_snapshot_xip(pg_current_snapshot())::text::bigint),
        ARRAY(SELECT name FROM qdo.queues WHERE app = of_app AND id = ANY (changed)),
        (SELECT due - qdo.clock() FROM qdo.delayed WHERE app = of_app
            ORDER BY due LIMIT 1),
        (SELECT last_value FROM qdo.positions),
        CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_flush_lsn() END - '0/0'
    INTO running, names, due_ticks, last_position, log_end;
END
$$;
CREATE OR REPLACE FUNCTION qdo.advance(seen bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    missing bigint := seen - (SELECT last_value FROM qdo.positions);
BEGIN
    IF missing > 0 THEN
        PERFORM qdo.reserve(missing);
    END IF;
END
$$;
CREATE OR REPLACE FUNCTION qdo.trim(of_app text, of_queue text, done bigint, older_ticks bigint)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    upto bigint := least(done, qdo.clock() - older_ticks);
    own record;
    hidden bigint;
    top bigint;
BEGIN
    SELECT id, trimmed INTO own FROM qdo.queues WHERE app = of_app AND name = of_queue;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    SELECT * INTO hidden, top FROM qdo.count_messages(own.id, own.trimmed, upto);
    IF hidden > 0 THEN
        UPDATE qdo.queues SET trimmed = top WHERE id = own.id AND trimmed < top;
    END IF;
    RETURN hidden;
END
$$;
CREATE OR REPLACE FUNCTION qdo.drop_partitions() RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET lock_timeout = '200ms' AS $$
DECLARE
    ticks bigint := (SELECT partition_ticks FROM qdo.about);
    closed bigint := qdo.reserve(1);
    before pg_snapshot;
    done text[] := ARRAY[]::text[];
    dropped text[] := ARRAY[]::text[];
    part record;
    name text;
    used boolean;
BEGIN
    PERFORM FROM qdo.about FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN dropped;
    END IF;
    PERFORM qdo.add_partitions();
    BEGIN
        before := pg_current_snapshot();
        FOR part IN
            SELECT relname, substring(relname FROM '[0-9]+$')::bigint AS number
            FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
            WHERE inhparent = 'qdo.messages'::regclass ORDER BY 2
        LOOP
            EXIT WHEN (part.number + 1) * ticks > closed OR cardinality(done) = 50;
            BEGIN
                EXECUTE format('WITH RECURSIVE found(queue) AS ('
                    ' (SELECT queue FROM qdo.%1$I ORDER BY queue LIMIT 1)'
                    ' UNION ALL SELECT (SELECT queue FROM qdo.%1$I AS further'
                    '   WHERE further.queue > found.queue ORDER BY queue LIMIT 1)'
                    ' FROM found WHERE found.queue IS NOT NULL)'
                    ' SELECT EXISTS (SELECT FROM found JOIN qdo.queues ON id = found.queue'
                    '   WHERE trimmed < (SELECT max(position) FROM qdo.%1$I AS own'
                    '     WHERE own.queue = found.queue))', part.relname) INTO used;
                RAISE EXCEPTION 'inspected' USING ERRCODE = 'QD000';
            EXCEPTION WHEN SQLSTATE 'QD000' THEN
                IF NOT used THEN
                    done := done || part.relname::text;
                END IF;
            END;
        END LOOP;
        IF cardinality(done) > 0 THEN
            LOCK TABLE ONLY qdo.messages IN ACCESS EXCLUSIVE MODE;
        END IF;
        FOREACH name IN ARRAY done LOOP
            EXECUTE format('SELECT EXISTS (SELECT FROM qdo.%1$I WHERE xid >= $1'
                ' AND xid < pg_snapshot_xmax(pg_current_snapshot())::text::bigint)'
                ' OR EXISTS (SELECT FROM qdo.%1$I WHERE xid = ANY ($2))', name)
                INTO used USING pg_snapshot_xmax(before)::text::bigint,
                ARRAY(SELECT pg_snapshot_xip(before)::text::bigint);
            CONTINUE WHEN used;
            EXECUTE format('DROP TABLE qdo.%I', name);
            dropped := dropped || name;
        END LOOP;
    EXCEPTION WHEN lock_not_available THEN
        dropped := ARRAY[]::text[];
    END;
    RETURN dropped;
END
$$;
CREATE OR REPLACE FUNCTION qdo.bury(
    of_app text, of_queue text, of_position bigint, body bytea, key text, headers text,
    error text, traceback text, attempts integer, worker text, fence bigint, dead_at float8
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM qdo.lock_queues(of_app, ARRAY[of_queue], NULL);
    INSERT INTO qdo.dead_letters
        SELECT id, of_position, body, key, headers, error, traceback, attempts, worker, fence,
            dead_at FROM qdo.queues WHERE app = of_app AND name = of_queue
        ON CONFLICT DO NOTHING;
END
$$;
CREATE OR REPLACE FUNCTION qdo.unix_time() RETURNS float8
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN extract(epoch FROM clock_timestamp());
END
$$;
CREATE OR REPLACE FUNCTION qdo.is_asker(asker text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN asker = session_user
        OR has_table_privilege(session_user, 'qdo.requests', 'SELECT')
        OR EXISTS (SELECT FROM pg_roles
            WHERE rolname = asker AND pg_has_role(session_user, oid, 'USAGE'));
END
$$;
CREATE OR REPLACE FUNCTION qdo.delete_requests(of_app text, of_ids text[]) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    steps text[];
    gone bigint := 0;
    count bigint;
BEGIN
    WHILE of_ids <> '{}' LOOP
        steps := ARRAY(SELECT id FROM qdo.requests WHERE app = of_app AND parent = ANY (of_ids));
        DELETE FROM qdo.requests WHERE app = of_app AND id = ANY (of_ids);
        GET DIAGNOSTICS count = ROW_COUNT;
        gone := gone + count;
        of_ids := steps;
    END LOOP;
    RETURN gone;
END
$$;
CREATE OR REPLACE FUNCTION qdo.ask_requests(
    of_node bigint, of_app text, pools text[], ids text[], priorities integer[], dues float8[],
    replies text[], keeps float8[], digests bytea[], heads text[], bodies bytea[], parents text[],
    deadlines float8[], states integer[], lock_ms integer
) RETURNS boolean[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    now float8 := qdo.unix_time();
    fresh text[] := ARRAY[]::text[];
    is_other boolean;
    opened text[];
    most bigint;
    added text[];
    missing bigint;
    other text;
BEGIN
    SELECT node <> of_node, ARRAY(
        SELECT pool FROM unnest(pools) AS given(pool) WHERE NOT EXISTS (
            SELECT FROM qdo.pools WHERE app = of_app AND name = pool))
        INTO is_other, opened FROM qdo.about;
    IF is_other THEN
        RAISE EXCEPTION 'another schema' USING ERRCODE = 'QD002';
    END IF;
    PERFORM set_config('qdo.staged', CASE WHEN of_node IS NULL THEN 'off' ELSE 'on' END, true);
    IF lock_ms IS NOT NULL THEN
        PERFORM set_config('lock_timeout', lock_ms::text, true);
    END IF;
    IF opened <> '{}' THEN
        INSERT INTO qdo.pools SELECT DISTINCT of_app, unnest(opened);
        most := coalesce((SELECT max_queues FROM qdo.apps WHERE name = of_app), 100000);
        IF (SELECT count(DISTINCT name) FROM qdo.pools WHERE app = of_app) > most THEN
            RAISE EXCEPTION 'too many pools'
                USING ERRCODE = 'QD001', DETAIL = opened[1], HINT = most;
        END IF;
    END IF;
    LOOP
        WITH new AS (
            INSERT INTO qdo.requests
                (app, pool, id, priority, asked, due, reply, keep, digest, headers, body, parent,
                    deadline, state)
                SELECT of_app, given.pool, given.id, given.priority, now,
                    CASE WHEN given.due < 0 THEN now - given.due ELSE given.due END,
                    given.reply, given.keep, given.digest, given.head, given.body, given.parent,
                    CASE WHEN given.deadline < 0 THEN now - given.deadline
                        ELSE coalesce(given.deadline, 0) END, coalesce(given.state, 0)
                FROM unnest(pools, ids, priorities, dues, replies, keeps, digests, heads, bodies,
                    parents, deadlines, states) WITH ORDINALITY AS given(
                        pool, id, priority, due, reply, keep, digest, head, body, parent, deadline,
                        state, place)
                ORDER BY given.place
                ON CONFLICT DO NOTHING RETURNING id
        ) SELECT array_agg(id) INTO added FROM new;
        fresh := fresh || added;
        IF cardinality(fresh) = cardinality(ids) THEN
            RETURN array_fill(true, ARRAY[cardinality(ids)]);
        END IF;
        CONTINUE WHEN qdo.delete_requests(of_app, ARRAY(
            SELECT id FROM qdo.requests AS known
            WHERE app = of_app AND id = ANY (ids) AND id <> ALL (coalesce(fresh, '{}')) AND state > 2
                AND until <= qdo.unix_time() AND qdo.is_asker(known.asker)
            FOR UPDATE)) > 0;
        SELECT count(*) FILTER (WHERE known.id IS NULL),
            min(given.id) FILTER (
                WHERE known.digest <> given.digest OR NOT qdo.is_asker(known.asker))
            INTO missing, other
            FROM unnest(ids, digests) AS given(id, digest)
            LEFT JOIN qdo.requests AS known
                ON app = of_app AND known.id = ANY (ids) AND known.id = given.id;
        IF other IS NOT NULL THEN
            RAISE EXCEPTION 'another request has this id' USING ERRCODE = 'QD004', DETAIL = other;
        END IF;
        EXIT WHEN missing = 0;
    END LOOP;
    RETURN ARRAY(
        SELECT fresh.id IS NOT NULL AND place = min(place) OVER (PARTITION BY given.id)
        FROM unnest(ids) WITH ORDINALITY AS given(id, place)
        LEFT JOIN unnest(fresh) AS fresh(id) USING (id) ORDER BY place);
END
$$;
CREATE OR REPLACE FUNCTION qdo.tell_of_requests() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM qdo.apps WHERE name = NEW.app FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND OR NOT EXISTS (SELECT FROM qdo.apps WHERE name = NEW.app) THEN
        PERFORM pg_notify(qdo.channel(NEW.app), 'again');
    END IF;
    RETURN NULL;
END
$$;
DROP TRIGGER IF EXISTS tell_of_requests ON qdo.requests;
CREATE CONSTRAINT TRIGGER tell_of_requests AFTER INSERT ON qdo.requests
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (current_setting('qdo.staged', true) = 'on')
    EXECUTE FUNCTION qdo.tell_of_requests();
ALTER TABLE qdo.requests ENABLE ALWAYS TRIGGER tell_of_requests;
CREATE OR REPLACE FUNCTION qdo.request_entries() RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN pg_stat_get_xact_tuples_returned('qdo.requests_waiting'::regclass)
        + pg_stat_get_xact_tuples_returned('qdo.requests_owned'::regclass);
END
$$;
CREATE OR REPLACE FUNCTION qdo.take_requests(
    of_app text, of_owner text, of_pool text, places integer, running text[], most_bytes bigint,
    since float8, passed bigint[], is_whole boolean, oldest_places integer
) RETURNS TABLE (
    id text, take integer, priority integer, failed integer, crashed boolean, error text,
    asked float8, reply text, headers text, body bytea, mark text, next_due float8,
    looked_at float8, looked_through bigint[], spent float8
)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    now float8 := qdo.unix_time();
    newest bigint := (
        SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM qdo.requests_number_seq);
    entries bigint := -qdo.request_entries();
    aged text[] := '{}';
    chosen text[];
    last bigint[];
    is_rest boolean;
BEGIN
    IF oldest_places > 0 THEN
        aged := ARRAY(
            SELECT id FROM qdo.requests WHERE app = of_app AND state < 1 AND id = ANY (ARRAY(
                SELECT found.id FROM generate_series(0, 9) AS given(priority) CROSS JOIN LATERAL (
                    SELECT id, number FROM qdo.requests
                    WHERE app = of_app AND pool = of_pool AND state = 0 AND due <= now
                        AND priority = given.priority
                        AND number > CASE WHEN is_whole THEN 0 ELSE passed[given.priority + 1] END
                    ORDER BY number LIMIT oldest_places
                ) AS found ORDER BY found.number LIMIT oldest_places))
            FOR UPDATE SKIP LOCKED);
    END IF;
    WITH own AS MATERIALIZED (
        SELECT id, -1 AS priority, number, coalesce(octet_length(body), 0) AS size FROM qdo.requests
        WHERE app = of_app AND owner = of_owner AND state IN (1, 2)
            AND started >= CASE WHEN is_whole THEN 0 ELSE since END
            AND pool = of_pool AND id <> ALL (running)
        FOR UPDATE SKIP LOCKED
    ), oldest AS (
        SELECT id, -1 AS priority, number, coalesce(octet_length(body), 0) AS size FROM qdo.requests
        WHERE app = of_app AND id = ANY (aged)
    ), next AS MATERIALIZED (
        SELECT found.* FROM generate_series(0, 9) AS given(priority) CROSS JOIN LATERAL (
            SELECT id, priority, number, coalesce(octet_length(body), 0) AS size FROM qdo.requests
            WHERE app = of_app AND pool = of_pool AND state = 0 AND due <= now
                AND priority = given.priority
                AND number > CASE WHEN is_whole THEN 0 ELSE passed[given.priority + 1] END
                AND id <> ALL (aged)
            ORDER BY number LIMIT places - cardinality(aged) FOR UPDATE SKIP LOCKED
        ) AS found LIMIT places - cardinality(aged)
    ), sized AS (
        SELECT *, sum(size) OVER (ORDER BY priority, number) - size < most_bytes AS fits
        FROM (SELECT * FROM own UNION ALL SELECT * FROM oldest UNION ALL SELECT * FROM next) AS found
    )
    SELECT array_agg(id) FILTER (WHERE fits),
        max(ARRAY[priority, number]) FILTER (WHERE fits AND priority >= 0),
        count(*) FILTER (WHERE priority >= 0) = places - cardinality(aged) OR count(*) FILTER (WHERE NOT fits) > 0
        INTO chosen, last, is_rest FROM sized;
    IF chosen IS NOT NULL THEN
        RETURN QUERY
        WITH taken AS (
            UPDATE qdo.requests AS held
            SET state = 1, owner = of_owner, take = held.take + 1, started = now, note = NULL,
                mark = CASE WHEN held.mark LIKE '{"cancel"%' THEN held.mark END
            WHERE app = of_app AND id = ANY (chosen)
            RETURNING held.*
        )
        SELECT id, take, priority, failed, crashed, error, asked, reply, headers,
            coalesce(body, ''), NULL, NULL::float8, NULL::float8, NULL::bigint[], NULL::float8
        FROM taken ORDER BY priority, number;
    END IF;
    RETURN QUERY
    WITH running AS MATERIALIZED (
        SELECT * FROM qdo.requests WHERE app = of_app AND id = ANY (running || chosen)
    )
    SELECT id, NULL::integer, NULL::integer, NULL::integer, NULL::boolean, NULL, NULL::float8,
        NULL, NULL, NULL::bytea, mark, NULL::float8, NULL::float8, NULL::bigint[], NULL::float8
    FROM running WHERE owner = of_owner AND state IN (1, 2) AND mark IS NOT NULL;
    next_due := now;
    IF NOT is_rest THEN
        passed := array_fill(newest, ARRAY[10]);
        SELECT min(due) INTO next_due FROM qdo.requests
            WHERE app = of_app AND pool = of_pool AND state = 0 AND due > now AND due > asked;
    ELSIF last IS NOT NULL THEN
        passed := array_fill(newest, ARRAY[last[1]::integer]) || last[2] || passed[last[1] + 2:];
    END IF;
    looked_at := now;
    looked_through := passed;
    entries := entries + qdo.request_entries();
    spent := CASE WHEN entries > 2000 THEN qdo.unix_time() - now ELSE 0 END;
    RETURN NEXT;
END
$$;
CREATE OR REPLACE FUNCTION qdo.report_requests(
    of_app text, of_ids text[], owners text[], takes integer[], states integer[], notes text[],
    failures integer[], due_times float8[], errors text[], outcomes text[], heads text[],
    results bytea[], places integer[], names text[], keys text[], headers text[], bodies bytea[],
    ids text[], dues bigint[], dedup_keys text[], dedup_ticks bigint[], lock_ms integer
) RETURNS boolean[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    valid bigint[];
    parents text[];
BEGIN
    IF lock_ms IS NOT NULL THEN
        PERFORM set_config('lock_timeout', lock_ms::text, true);
    END IF;
    WITH changed AS (
        UPDATE qdo.requests AS held SET
            state = given.state,
            owner = CASE given.state WHEN 0 THEN '' ELSE held.owner END,
            note = CASE WHEN given.state < 3 THEN given.note
                WHEN given.outcome <> 'done' THEN held.note END,
            mark = CASE WHEN given.state = 3 THEN NULL
                WHEN held.mark LIKE '{"cancel"%' OR given.state = 2 AND held.state = 2
                    THEN held.mark
                WHEN given.state = 2 THEN format('{"paused": %s}', qdo.unix_time()) END,
            crashed = held.crashed AND coalesce(given.failed = held.failed, true),
            failed = coalesce(given.failed, held.failed),
            due = CASE WHEN given.due < 0 THEN qdo.unix_time() - given.due
                ELSE coalesce(given.due, held.due) END,
            error = CASE given.state WHEN 3 THEN given.error
                ELSE coalesce(given.error, held.error) END,
            headers = CASE given.outcome WHEN 'done' THEN NULL ELSE held.headers END,
            body = CASE given.outcome WHEN 'done' THEN NULL ELSE held.body END,
            outcome = given.outcome, result_headers = given.head, result = given.result,
            until = CASE given.state WHEN 3 THEN qdo.unix_time() + held.keep ELSE 0 END
        FROM unnest(of_ids, owners, takes, states, notes, failures, due_times, errors, outcomes,
            heads, results) WITH ORDINALITY AS given(
                id, owner, take, state, note, failed, due, error, outcome, head, result, place)
        WHERE app = of_app AND held.id = ANY (of_ids) AND held.id = given.id
            AND held.owner = given.owner AND held.take = given.take
            AND CASE given.state WHEN 3 THEN held.state < 3 ELSE held.state IN (1, 2) END
        RETURNING given.place, CASE given.state WHEN 3 THEN held.parent END AS parent
    ) SELECT array_agg(place), array_agg(DISTINCT parent) FILTER (WHERE parent IS NOT NULL)
        INTO valid, parents FROM changed;
    IF parents IS NOT NULL THEN
        PERFORM qdo.wake_requests(of_app, parents);
    END IF;
    IF valid IS NOT NULL AND names IS NOT NULL THEN
        SELECT array_agg(name ORDER BY number), array_agg(key ORDER BY number),
            array_agg(head ORDER BY number), array_agg(body ORDER BY number),
            array_agg(id ORDER BY number), array_agg(due ORDER BY number),
            array_agg(dedup_key ORDER BY number), array_agg(ticks ORDER BY number)
            INTO names, keys, headers, bodies, ids, dues, dedup_keys, dedup_ticks
            FROM unnest(places, names, keys, headers, bodies, ids, dues, dedup_keys, dedup_ticks)
                WITH ORDINALITY AS given(
                    place, name, key, head, body, id, due, dedup_key, ticks, number)
            WHERE place = ANY (valid);
        IF array_remove(ids, NULL) || array_remove(dedup_keys, NULL) <> '{}' THEN
            PERFORM qdo.send(
                of_app, names, keys, headers, bodies, ids, dues, dedup_keys, dedup_ticks, NULL);
        ELSIF names IS NOT NULL THEN
            PERFORM qdo.append(of_app, names, keys, headers, bodies, NULL);
        END IF;
    END IF;
    IF cardinality(valid) = cardinality(of_ids) THEN
        RETURN array_fill(true, ARRAY[cardinality(of_ids)]);
    END IF;
    RETURN ARRAY(
        SELECT place = ANY (coalesce(valid, '{}')) OR given.state = 3 AND EXISTS (
            SELECT FROM qdo.requests AS held
            WHERE app = of_app AND held.id = given.id AND held.state > 2
                AND held.owner = given.owner AND held.take = given.take)
        FROM unnest(of_ids, owners, takes, states) WITH ORDINALITY
            AS given(id, owner, take, state, place) ORDER BY place);
END
$$;
CREATE OR REPLACE FUNCTION qdo.wake_requests(of_app text, of_ids text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    PERFORM FROM qdo.requests WHERE app = of_app AND id = ANY (of_ids)
        ORDER BY id FOR NO KEY UPDATE;
    UPDATE qdo.requests AS held SET state = 0, due = qdo.unix_time(), note = NULL
        WHERE app = of_app AND id = ANY (of_ids) AND state + 0 = 2 AND owner = '' AND take > 0
            AND NOT EXISTS (SELECT FROM qdo.requests AS step
                WHERE app = of_app AND step.parent = held.id AND step.state < 3);
    IF FOUND THEN
        PERFORM pg_notify(qdo.channel(of_app), 'again');
    END IF;
END
$$;
CREATE OR REPLACE FUNCTION qdo.suspend_request(
    of_app text, of_id text, of_owner text, of_take integer, of_note text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE qdo.requests SET state = 2, owner = '', note = of_note, failed = 0, crashed = false
        WHERE app = of_app AND id = of_id AND owner = of_owner AND take = of_take
            AND state BETWEEN 1 AND 2;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM qdo.wake_requests(of_app, ARRAY[of_id]);
    RETURN true;
END
$$;
CREATE OR REPLACE FUNCTION qdo.end_request(
    of_app text, of_id text, of_take integer, ending text, why text, head text, answer bytea,
    names text[], keys text[], headers text[], bodies bytea[], ids text[], dues bigint[],
    dedup_keys text[], dedup_ticks bigint[]
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (SELECT FROM qdo.find_request(of_app, of_id)
            WHERE ending = 'cancelled' OR ending = 'done' AND state >= 2 AND take = 0)
        AND (qdo.report_requests(
        of_app, ARRAY[of_id], ARRAY[''], ARRAY[of_take], ARRAY[3], NULL, NULL, NULL, ARRAY[why],
        ARRAY[ending], ARRAY[head], ARRAY[answer], ARRAY(SELECT 1 FROM unnest(names)), names, keys,
        headers, bodies, ids, dues, dedup_keys, dedup_ticks, NULL))[1];
END
$$;
CREATE OR REPLACE FUNCTION qdo.mark_request(
    of_app text, of_id text, of_mark text, asked text DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF of_mark LIKE '{"cancel"%' AND EXISTS (
            SELECT FROM qdo.requests WHERE app = of_app AND parent = of_id) THEN
        UPDATE qdo.requests SET deadline = qdo.unix_time()
            WHERE app = of_app AND id = of_id AND qdo.is_asker(asker) AND state + 0 < 3;
        RETURN FOUND;
    END IF;
    UPDATE qdo.requests AS held SET mark = of_mark
        WHERE app = of_app AND id = of_id AND qdo.is_asker(asker) AND owner <> ''
            AND CASE WHEN of_mark LIKE '{"cancel"%' THEN state BETWEEN 1 AND 2
                ELSE state = 2 AND held.mark IS NOT DISTINCT FROM mark_request.asked
                    AND coalesce(held.mark, '{"paused"') LIKE '{"paused"%' END;
    RETURN FOUND;
END
$$;
CREATE OR REPLACE FUNCTION qdo.retry_request(of_app text, of_id text, forget text[])
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE qdo.requests SET state = 0, owner = '', take = take + 1, failed = 0,
        crashed = false, due = qdo.unix_time(), note = NULL, error = NULL, outcome = NULL,
        result_headers = NULL, result = NULL, until = 0, deadline = 0
        WHERE app = of_app AND id = of_id AND state > 2 AND body IS NOT NULL AND parent IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM qdo.requests
        WHERE app = of_app AND id = ANY (forget) AND parent IS NOT NULL;
    RETURN true;
END
$$;
CREATE OR REPLACE FUNCTION qdo.give_back_requests(of_app text, of_owner text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    given bigint;
BEGIN
    UPDATE qdo.requests SET state = 0, owner = '', failed = failed + 1, crashed = true,
        due = qdo.unix_time(), note = NULL,
        mark = CASE WHEN mark LIKE '{"cancel"%' THEN mark END,
        error = format('worker %s died, or lost its session', of_owner)
        WHERE app = of_app AND owner = of_owner AND state IN (1, 2);
    GET DIAGNOSTICS given = ROW_COUNT;
    RETURN given;
END
$$;
CREATE OR REPLACE FUNCTION qdo.find_request(of_app text, of_id text) RETURNS SETOF qdo.requests
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT * FROM qdo.requests
        WHERE app = of_app AND id = of_id AND qdo.is_asker(asker);
END
$$;
CREATE OR REPLACE FUNCTION qdo.discard_requests(of_app text, of_ids text[]) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN qdo.delete_requests(of_app, ARRAY(
        SELECT id FROM qdo.requests WHERE app = of_app AND id = ANY (of_ids)
            AND state > 2 AND outcome = 'failed' AND parent IS NULL FOR UPDATE));
END
$$;
CREATE OR REPLACE FUNCTION qdo.expire_requests(of_app text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    now float8 := qdo.unix_time();
    gone bigint;
BEGIN
    gone := qdo.delete_requests(of_app, ARRAY(
        SELECT id FROM qdo.requests
        WHERE app = of_app AND state = 3 AND outcome IS DISTINCT FROM 'failed' AND parent IS NULL
            AND until <= now ORDER BY until LIMIT 1000 FOR UPDATE SKIP LOCKED));
    DELETE FROM qdo.pools WHERE app = of_app AND NOT EXISTS (
        SELECT FROM qdo.requests WHERE app = of_app AND pool = name AND state = 0);
    RETURN gone;
END
$$;
CREATE OR REPLACE FUNCTION qdo.check_room(of_app text, wanted bigint, example text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    most integer;
BEGIN
    IF wanted + (SELECT count(*) FROM qdo.queues WHERE app = of_app
            AND xid = pg_current_xact_id()::text::bigint) > 100 THEN
        PERFORM FROM qdo.apps WHERE name = of_app FOR NO KEY UPDATE;
    END IF;
    SELECT max_queues INTO most FROM qdo.apps WHERE name = of_app;
    IF wanted + (SELECT count(*) FROM qdo.queues WHERE app = of_app) > coalesce(most, 100000) THEN
        RAISE EXCEPTION 'too many queues' USING ERRCODE = 'QD001', DETAIL = example, HINT = most;
    END IF;
END
$$;
CREATE OR REPLACE FUNCTION qdo.lock_queues(of_app text, names text[], lock_ms integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wanted integer := CASE cardinality(names) WHEN 1 THEN 1
        ELSE (SELECT count(DISTINCT name) FROM unnest(names) AS name) END;
    found integer := 1;
    missing text;
    has_shards boolean;
BEGIN
    IF lock_ms IS NOT NULL THEN
        PERFORM set_config('lock_timeout', lock_ms::text, true);
    END IF;
    FOR round IN 1 .. 10 LOOP
        IF wanted > 1 THEN
            SELECT count(*) INTO found FROM qdo.queues
                WHERE app = of_app AND name = ANY (names);
        END IF;
        IF found >= wanted THEN
            SELECT count(*), bool_or(root IS NOT NULL) INTO found, has_shards FROM (
                SELECT root FROM qdo.queues
                WHERE app = of_app AND name = ANY (names) ORDER BY id FOR NO KEY UPDATE
            ) AS locked;
            IF found >= wanted THEN
                RETURN has_shards;
            END IF;
        END IF;
        IF EXISTS (SELECT FROM unnest(names) AS given(name)
                JOIN qdo.streams ON app = of_app AND stream = qdo.stream_of(given.name)
                LEFT JOIN qdo.queues AS known ON known.app = of_app
                    AND known.name = given.name WHERE known.name IS NULL) THEN
            RETURN true;
        END IF;
        SELECT given.name INTO missing FROM unnest(names) AS given(name) WHERE NOT EXISTS (
            SELECT FROM qdo.queues AS known WHERE app = of_app AND known.name = given.name
        ) LIMIT 1;
        IF missing IS NOT NULL THEN
            PERFORM qdo.check_room(of_app, wanted - found, missing);
        END IF;
        INSERT INTO qdo.queues (app, name)
            SELECT DISTINCT of_app, name FROM unnest(names) AS name ORDER BY name
            ON CONFLICT DO NOTHING;
        found := wanted;
    END LOOP;
    RAISE EXCEPTION 'these queues are deleted all the time' USING ERRCODE = 'lock_not_available';
END
$$;
CREATE OR REPLACE FUNCTION qdo.key_hash(key text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN left(encode(sha256(convert_to(key, 'UTF8')), 'hex'), 16);
END
$$;
CREATE OR REPLACE FUNCTION qdo.stream_of(name text) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN substring(name FROM
        '^([^.]+)\.(?:[0-9a-f]{2}){0,8}-(?:[0-9a-f]{2}){0,8}(?:\.[0-9]+)?$');
END
$$;
CREATE OR REPLACE FUNCTION qdo.route(of_app text, names text[], keys text[]) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    routed text[];
    keyless text;
BEGIN
    WITH named AS MATERIALIZED (
        SELECT name, stream FROM (
            SELECT given.name, coalesce(own.stream, qdo.stream_of(given.name)) AS stream
            FROM (SELECT DISTINCT name FROM unnest(names) AS name) AS given
            LEFT JOIN qdo.streams AS own ON own.app = of_app AND own.queue = given.name
            WHERE NOT EXISTS (SELECT FROM qdo.queues AS plain
                WHERE plain.app = of_app AND plain.name = given.name AND root IS NULL)
        ) AS found WHERE EXISTS (SELECT FROM qdo.streams
            WHERE app = of_app AND streams.stream = found.stream)
    )
    SELECT array_agg(coalesce(heir.queue, given.name) ORDER BY place),
        min(given.name) FILTER (WHERE given.key IS NULL AND named.name IS NOT NULL)
        INTO routed, keyless
        FROM unnest(names, keys) WITH ORDINALITY AS given(name, key, place)
        LEFT JOIN named ON named.name = given.name
        LEFT JOIN LATERAL (
            SELECT queue FROM qdo.streams
            WHERE app = of_app AND stream = named.stream AND end_position IS NULL
                AND low <= left(encode(sha256(convert_to(given.key, 'UTF8')), 'hex'), 16)
            ORDER BY low DESC LIMIT 1
        ) AS heir ON true;
    IF keyless IS NOT NULL THEN
        RAISE EXCEPTION 'a message for %, a shard of a stream, must have a key', keyless
            USING ERRCODE = 'QD006', DETAIL = keyless;
    END IF;
    RETURN nullif(routed, names);
END
$$;
CREATE OR REPLACE FUNCTION qdo.lock_open(of_app text, names text[], keys text[]) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    next text[];
    found text[];
BEGIN
    FOR round IN 1 .. 10 LOOP
        next := qdo.route(of_app, names, keys);
        IF next IS NULL THEN
            RETURN found;
        END IF;
        names := next;
        found := next;
        PERFORM qdo.lock_queues(of_app, names, NULL);
        PERFORM pg_notify(qdo.channel(of_app), '');
    END LOOP;
    RAISE EXCEPTION 'the shards of a stream change all the time'
        USING ERRCODE = 'lock_not_available', DETAIL = names[1];
END
$$;
CREATE OR REPLACE FUNCTION qdo.append(
    of_app text, names text[], keys text[], headers text[], bodies bytea[], lock_ms integer
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    count bigint := cardinality(names);
    own_xid bigint := pg_current_xact_id()::text::bigint;
    first bigint;
    longest_key integer;
    longest_head integer := 0;
    longest_body integer := (SELECT max(octet_length(body)) FROM unnest(bodies) AS body);
BEGIN
    IF keys IS NOT NULL OR headers IS NOT NULL THEN
        SELECT max(length(key)), coalesce(max(octet_length(head)), 0)
            INTO longest_key, longest_head FROM unnest(keys, headers) AS given(key, head);
    END IF;
    IF longest_body > 67108864 OR longest_head > 131072 OR longest_key > 1000 THEN
        RAISE EXCEPTION 'a message is too large' USING ERRCODE = 'check_violation';
    END IF;
    IF qdo.lock_queues(of_app, names, lock_ms) THEN
        names := coalesce(qdo.lock_open(of_app, names, keys), names);
    END IF;
    LOCK TABLE ONLY qdo.messages IN ROW EXCLUSIVE MODE;
    first := qdo.reserve(count);
    PERFORM qdo.add_partition(first);
    IF count > 1 THEN
        PERFORM qdo.add_partition(first + count - 1);
    END IF;
    INSERT INTO qdo.messages (queue, position, xid, key, headers, body)
        SELECT queues.id, first + place - 1, own_xid, given.key, given.head, given.body
        FROM unnest(names, keys, headers, bodies)
            WITH ORDINALITY AS given(name, key, head, body, place)
        JOIN qdo.queues ON app = of_app AND queues.name = given.name;
    IF longest_body + longest_head > 4096 THEN
        UPDATE qdo.queues SET largest = sizes.size FROM (
            SELECT name, (2 ^ ceil(log(2, max(bytes))))::integer AS size FROM (
                SELECT name, octet_length(body) + coalesce(octet_length(head), 0) AS bytes
                FROM unnest(names, bodies, headers) AS given(name, body, head)
            ) AS given WHERE bytes > 4096 GROUP BY name
        ) AS sizes WHERE app = of_app AND queues.name = sizes.name AND largest < sizes.size;
    END IF;
    RETURN first;
END
$$;
CREATE OR REPLACE FUNCTION qdo.send(
    of_app text, names text[], keys text[], headers text[], bodies bytea[], ids text[],
    dues bigint[], dedup_keys text[], dedup_ticks bigint[], lock_ms integer
) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    sent text[] := ARRAY[]::text[];
    now bigint;
    own bigint;
    keeper bigint;
    place bigint;
    known text;
    id text;
    digest bytea;
BEGIN
    IF qdo.lock_queues(of_app, names, lock_ms) THEN
        names := coalesce(qdo.lock_open(of_app, names, keys), names);
    END IF;
    now := qdo.clock();
    FOR i IN 1 .. cardinality(names) LOOP
        SELECT queues.id, root INTO own, keeper
            FROM qdo.queues WHERE app = of_app AND name = names[i];
        IF dedup_keys[i] IS NOT NULL THEN
            IF dedup_ticks[i] NOT BETWEEN 0 AND 316224000000000 THEN
                RAISE EXCEPTION 'the window of a deduplication key is too long'
                    USING ERRCODE = 'invalid_parameter_value';
            END IF;
            dedup_keys[i] := CASE WHEN keeper IS NULL THEN '' ELSE qdo.key_hash(keys[i]) END
                || dedup_keys[i];
            digest := sha256(convert_to(dedup_keys[i], 'UTF8'));
            keeper := coalesce(keeper, own);
            SELECT dedup.id INTO known FROM qdo.dedup
                WHERE queue = keeper AND key = digest AND until + 0 > now;
            IF FOUND THEN
                sent := sent || known;
                CONTINUE;
            END IF;
        END IF;
        id := ids[i];
        IF dues[i] < 0 THEN
            dues[i] := now - dues[i];
        END IF;
        IF dues[i] > now THEN
            INSERT INTO qdo.delayed (app, due, queue, key, headers, body)
                VALUES (of_app, dues[i], own, keys[i], headers[i], bodies[i]);
        ELSE
            place := qdo.append(of_app, names[i:i], keys[i:i], headers[i:i], bodies[i:i],
                NULL);
            id := coalesce(id, qdo.message_id(place));
        END IF;
        IF dedup_keys[i] IS NOT NULL THEN
            INSERT INTO qdo.dedup (queue, key, id, until)
                VALUES (keeper, digest, id, now + dedup_ticks[i])
                ON CONFLICT (queue, key) DO UPDATE SET id = excluded.id, until = excluded.until;
        END IF;
        sent := sent || id;
    END LOOP;
    RETURN sent;
END
$$;
CREATE OR REPLACE FUNCTION qdo.free_key(
    of_app text, of_queue text, of_key text, dedup_key text, of_id text
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM qdo.dedup USING qdo.queues
    WHERE app = of_app AND name = of_queue AND dedup.queue = coalesce(root, queues.id)
        AND key = sha256(convert_to(CASE WHEN root IS NULL THEN ''
            ELSE qdo.key_hash(of_key) END || dedup_key, 'UTF8'))
        AND dedup.id = of_id
$$;
CREATE OR REPLACE FUNCTION qdo.newest(of_queue bigint, after bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    span record;
    found bigint;
BEGIN
    FOR span IN
        SELECT lag(last, 1, after) OVER (ORDER BY last) AS first, last
        FROM qdo.spans(after) AS last ORDER BY last DESC
    LOOP
        BEGIN
            SELECT max(position) INTO found FROM qdo.messages
                WHERE queue = of_queue AND position > span.first AND position <= span.last;
            RAISE EXCEPTION 'found' USING ERRCODE = 'QD000';
        EXCEPTION WHEN SQLSTATE 'QD000' THEN
            IF found IS NOT NULL THEN
                RETURN found;
            END IF;
        END;
    END LOOP;
    RETURN after;
END
$$;
CREATE OR REPLACE FUNCTION qdo.add_shards(
    of_app text, of_stream text, shards integer, of_parents text[], bound text
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    taken text;
    parent record;
    of_root bigint;
    lows text[];
    highs text[];
    bounds text[];
    names text[];
BEGIN
    IF of_parents = '{}' THEN
        IF EXISTS (SELECT FROM qdo.streams WHERE app = of_app AND stream = of_stream) THEN
            RETURN;
        END IF;
        IF (of_stream ~ '^[^.]+$' AND shards BETWEEN 1 AND 4096 AND shards & (shards - 1) = 0)
            IS NOT TRUE
        THEN
            RAISE EXCEPTION 'shards must be a power of two up to 4096 of a stream without a dot'
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        bounds := ARRAY(
            SELECT regexp_replace(lpad(to_hex(65536 / shards * place), 4, '0'), '(00)+$', '')
            FROM generate_series(0, shards - 1) AS place ORDER BY place) || ''::text;
    ELSE
        SELECT array_agg(low ORDER BY low), array_agg(high ORDER BY low) INTO lows, highs
            FROM qdo.streams WHERE app = of_app AND queue = ANY (of_parents);
        bounds := array_remove(ARRAY[lows[1], bound, highs[cardinality(highs)]], NULL);
        IF lows IS NULL OR lows[2:] <> trim_array(highs, 1)
            OR (cardinality(lows) = 1) <> (bound IS NOT NULL)
            OR bound !~ '^([0-9a-f]{2}){0,7}([0-9a-f][1-9a-f]|[1-9a-f]0)$'
            OR NOT (bound COLLATE "C" > lows[1] AND (highs[1] = '' OR bound < highs[1]))
        THEN
            RAISE EXCEPTION 'shards must be neighbors, or one that is divided at a bound within it'
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END IF;
    names := ARRAY(SELECT of_stream || '.' || bounds[place] || '-' || bounds[place + 1]
        || CASE WHEN used > 0 THEN '.' || used + 1 ELSE '' END
        FROM generate_series(1, cardinality(bounds) - 1) AS place CROSS JOIN LATERAL (
            SELECT count(*) AS used FROM qdo.streams WHERE app = of_app AND stream = of_stream
                AND low = bounds[place] AND high = bounds[place + 1]) AS known ORDER BY place);
    IF of_parents = '{}' THEN
        INSERT INTO qdo.streams (app, stream, queue, low, high, parents, hidden, is_first)
            VALUES (of_app, of_stream, names[1], '', bounds[2], '{}', false, true)
            ON CONFLICT (app, stream) WHERE is_first DO NOTHING;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    END IF;
    SELECT name INTO taken FROM qdo.queues
        WHERE app = of_app AND name = ANY (names) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the queue exists' USING ERRCODE = 'QD007', DETAIL = taken;
    END IF;
    PERFORM qdo.check_room(of_app, cardinality(names), names[1]);
    PERFORM FROM qdo.queues WHERE app = of_app AND name = ANY (of_parents)
        ORDER BY id FOR NO KEY UPDATE;
    FOR parent IN
        SELECT given.name, id, trimmed, root FROM unnest(of_parents) AS given(name)
        LEFT JOIN qdo.queues ON app = of_app AND queues.name = given.name
    LOOP
        UPDATE qdo.streams SET end_position = qdo.newest(parent.id, parent.trimmed)
            WHERE app = of_app AND stream = of_stream AND queue = parent.name
                AND end_position IS NULL;
        IF NOT FOUND OR parent.id IS NULL THEN
            RAISE EXCEPTION 'sealed' USING ERRCODE = 'QD005', DETAIL = parent.name;
        END IF;
        of_root := parent.root;
        UPDATE qdo.queues SET root = root WHERE id = parent.id;
    END LOOP;
    INSERT INTO qdo.queues (app, name, root)
        SELECT of_app, name, of_root FROM unnest(names) WITH ORDINALITY AS given(name, place)
        ORDER BY place;
    UPDATE qdo.queues SET root = (
            SELECT min(id) FROM qdo.queues WHERE app = of_app AND name = ANY (names))
        WHERE app = of_app AND name = ANY (names) AND root IS NULL;
    INSERT INTO qdo.streams (app, stream, queue, low, high, parents, hidden)
        SELECT of_app, of_stream, names[place], bounds[place], bounds[place + 1], of_parents,
            of_parents <> '{}' FROM generate_series(1, cardinality(names)) AS place
        WHERE of_parents <> '{}' OR place > 1 ORDER BY place;
END
$$;
CREATE OR REPLACE FUNCTION qdo.create_stream(of_app text, of_stream text, shards integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM qdo.add_shards(of_app, of_stream, shards, '{}', NULL);
END
$$;
CREATE OR REPLACE FUNCTION qdo.open_shards(of_app text, names text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE qdo.streams SET hidden = false WHERE app = of_app AND queue = ANY (names);
END
$$;
CREATE OR REPLACE FUNCTION qdo.delete_queue(
    of_app text, of_queue text, done bigint,
    OUT waiting bigint, OUT later bigint, OUT dead bigint
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    own record;
BEGIN
    waiting := 0; later := 0; dead := 0;
    SELECT id, trimmed, root INTO own FROM qdo.queues WHERE app = of_app AND name = of_queue
        FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT total INTO waiting
        FROM qdo.count_messages(own.id, greatest(done, own.trimmed), 9223372036854775807);
    SELECT count(*) INTO later FROM qdo.delayed WHERE queue = own.id;
    SELECT count(*) INTO dead FROM qdo.dead_letters WHERE queue = own.id;
    IF waiting + later + dead > 0 THEN
        RETURN;
    END IF;
    DELETE FROM qdo.dedup WHERE queue = own.id AND own.root IS NULL;
    DELETE FROM qdo.queues WHERE id = own.id;
END
$$;
CREATE OR REPLACE FUNCTION qdo.json_of(data bytea) RETURNS jsonb
LANGUAGE plpgsql STABLE STRICT AS $$
BEGIN
    RETURN pg_catalog.convert_from(data, 'UTF8')::pg_catalog.jsonb;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$$;
CREATE OR REPLACE FUNCTION qdo.time_of(data text) RETURNS timestamptz
LANGUAGE plpgsql STABLE STRICT AS $$
BEGIN
    RETURN data::pg_catalog.timestamptz;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$$;
CREATE OR REPLACE VIEW qdo.nodes AS
SELECT apps.name AS app, apps.root
FROM qdo.apps JOIN qdo.znodes
    ON parent = regexp_replace(root, '/[^/]*$', '') COLLATE "C"
    AND znodes.name = regexp_replace(root, '^.*/', '') COLLATE "C"
WHERE split_part(fleet, ' ', 1) = to_hex(czxid) || '-' || to_hex(ctime);
CREATE OR REPLACE VIEW qdo.progress AS
SELECT queues.id, queues.app, queues.name AS queue, trimmed, nodes.root, node.value,
    CASE WHEN nodes.root IS NOT NULL THEN greatest(trimmed,
        substring(node.value ->> 'last' FROM '^[0-9]{1,18}$')::bigint) END AS done
FROM qdo.queues LEFT JOIN qdo.nodes ON nodes.app = queues.app
LEFT JOIN LATERAL (
    SELECT qdo.json_of(data) AS value FROM qdo.znodes
    WHERE parent = nodes.root || '/queues' AND znodes.name = queues.name COLLATE "C"
    OFFSET 0
) AS node ON true;
CREATE OR REPLACE VIEW qdo.qdo_queues AS
SELECT app, progress.queue, value ->> 'owner' AS worker,
    CASE WHEN root IS NOT NULL THEN waiting.count END AS waiting,
    to_timestamp((waiting.first - 122192928000000000) / 1e7) AS waiting_since,
    value ? 'blocked' AS is_blocked,
    coalesce(value -> 'blocked', value -> 'failing') ->> 'error' AS error, done AS position
FROM qdo.progress CROSS JOIN LATERAL (
    SELECT count(*) AS count, min(position) AS first FROM qdo.messages
    WHERE messages.queue = progress.id AND position > done
) AS waiting;
CREATE OR REPLACE VIEW qdo.qdo_messages AS
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
    qdo.json_of(convert_to(messages.headers, 'UTF8')) AS headers,
    CASE WHEN (SELECT has_table_privilege('qdo.messages', 'SELECT'))
        THEN qdo.json_of(messages.body) END AS body,
    octet_length(messages.body) AS bytes, messages.position
FROM qdo.progress
JOIN qdo.messages ON messages.queue = progress.id AND messages.position > trimmed
LEFT JOIN qdo.dead_letters AS dead
    ON dead.queue = messages.queue AND dead.position = messages.position
CROSS JOIN qdo.about
UNION ALL
SELECT delayed.app, queues.name, substring(headers FROM '"qdo-id": ?"([^"\\]+)"'), 'delayed', NULL,
    to_timestamp((least(due, 9e17) - 122192928000000000) / 1e7), key,
    qdo.json_of(convert_to(headers, 'UTF8')),
    CASE WHEN (SELECT has_table_privilege('qdo.messages', 'SELECT'))
        THEN qdo.json_of(body) END, octet_length(body), NULL
FROM qdo.delayed JOIN qdo.queues ON queues.id = queue;
CREATE OR REPLACE FUNCTION qdo.qdo_message(of_id text) RETURNS SETOF qdo.qdo_messages
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    hex text := substring(of_id FROM '^[0-9a-f]{8}-[0-9a-f]{4}-1[0-9a-f]{3}-8000-');
    place bigint := ('x0' || substring(hex FROM 16 FOR 3) || substring(hex FROM 10 FOR 4)
        || left(hex, 8))::bit(64)::bigint;
BEGIN
    RETURN QUERY SELECT * FROM qdo.qdo_messages WHERE position = place AND id = of_id;
    IF NOT FOUND THEN
        RETURN QUERY SELECT * FROM qdo.qdo_messages WHERE id = of_id;
    END IF;
END
$$;
CREATE OR REPLACE FUNCTION qdo.qdo_send(
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
    PERFORM qdo.stage((SELECT node FROM qdo.about), app, ARRAY[queue], ARRAY[key],
        ARRAY[headers::text], ARRAY[convert_to(body::text, 'UTF8')], ARRAY[id],
        ARRAY[-(nullif(greatest(later, 0), 0) * 10000000)::bigint], ARRAY[dedup_key],
        ARRAY[(extract(epoch FROM dedup_for) * 10000000)::bigint]);
    RETURN id;
END
$$;
CREATE OR REPLACE VIEW qdo.readable_requests AS
SELECT app, pool, id, priority, asker, to_timestamp(least(asked, 9e12)) AS asked_at,
    to_timestamp(least(due, 9e12)) AS due_at,
    to_timestamp(nullif(least(started, 9e12), 0)) AS started_at,
    CASE state WHEN 3 THEN to_timestamp(least(until - keep, 9e12)) END AS ended_at,
    nullif(owner, '') AS worker, take AS runs, failed AS failed_attempts, error, note,
    CASE WHEN (SELECT has_table_privilege('qdo.requests', 'SELECT'))
        THEN qdo.json_of(body) END AS body,
    CASE WHEN (SELECT has_table_privilege('qdo.requests', 'SELECT'))
        THEN qdo.json_of(result) END AS result,
    state AS state_number, outcome, parent,
    to_timestamp(nullif(least(deadline, 9e12), 0)) AS deadline_at
FROM qdo.requests;
CREATE OR REPLACE VIEW qdo.qdo_requests AS
SELECT 'waiting' AS state, * FROM qdo.readable_requests WHERE state_number = 0
UNION ALL SELECT 'running', * FROM qdo.readable_requests WHERE state_number = 1
UNION ALL SELECT 'paused', * FROM qdo.readable_requests WHERE state_number = 2
UNION ALL SELECT 'failed', * FROM qdo.readable_requests
    WHERE state_number = 3 AND outcome = 'failed' AND parent IS NULL
UNION ALL SELECT outcome, * FROM qdo.readable_requests
    WHERE state_number = 3 AND outcome IS DISTINCT FROM 'failed' AND parent IS NULL
UNION ALL SELECT outcome, * FROM qdo.readable_requests
    WHERE state_number = 3 AND parent IS NOT NULL;
CREATE OR REPLACE VIEW qdo.qdo_failed AS
SELECT app, 'message' AS kind, name AS queue,
    coalesce(substring(headers FROM '"qdo-id": ?"([^"\\]+)"'),
        lpad(to_hex(position & 4294967295), 8, '0')
        || '-' || lpad(to_hex((position >> 32) & 65535), 4, '0')
        || '-' || lpad(to_hex(((position >> 48) & 4095) | 4096), 4, '0')
        || '-8000-' || lpad(to_hex(node), 12, '0')) AS id,
    to_timestamp(least(dead_at, 9e12)) AS failed_at, error, attempts, worker, key,
    CASE WHEN (SELECT has_table_privilege('qdo.dead_letters', 'SELECT'))
        THEN qdo.json_of(body) END AS body,
    CASE WHEN (SELECT has_table_privilege('qdo.dead_letters', 'SELECT'))
        THEN traceback END AS traceback
FROM qdo.dead_letters JOIN qdo.queues ON queues.id = queue CROSS JOIN qdo.about
UNION ALL
SELECT app, 'request', pool, id, ended_at, error, failed_attempts, worker, NULL, body, NULL
FROM qdo.readable_requests
WHERE state_number = 3 AND outcome = 'failed' AND parent IS NULL;
CREATE OR REPLACE VIEW qdo.qdo_timers AS
SELECT app, znodes.name AS timer, value ->> 'queue' AS queue, value ->> 'when' AS schedule,
    qdo.time_of(value ->> 'last') AS last_at, qdo.time_of(value ->> 'next') AS next_at,
    value ->> 'refused' AS error
FROM qdo.nodes JOIN qdo.znodes ON parent = root || '/timers'
CROSS JOIN LATERAL (SELECT qdo.json_of(data) AS value OFFSET 0) AS node;
CREATE OR REPLACE VIEW qdo.qdo_workers AS
SELECT app, value ->> 'worker' AS worker, value ->> 'host' AS host, value ->> 'version' AS version,
    value ->> 'state' AS state, heard AS heard_at,
    to_timestamp(jsonb_path_query_first(value, '$.started ? (@ > 0 && @ < 9e9)')::float8)
        AS started_at,
    jsonb_path_query_first(value, '$.queues ? (@ >= 0 && @ < 2e9)')::integer AS queues,
    jsonb_path_query_first(value, '$.busy ? (@ >= 0 && @ < 2e9)')::integer AS busy,
    jsonb_path_query_first(value, '$.processed ? (@ >= 0 && @ < 9e18)')::bigint AS processed,
    value AS report
FROM qdo.nodes JOIN qdo.znodes ON parent = root || '/components/worker'
CROSS JOIN LATERAL (SELECT qdo.json_of(data) AS value OFFSET 0) AS node
LEFT JOIN qdo.sessions ON sessions.id = znodes.owner;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA qdo FROM PUBLIC;
SELECT qdo.add_partitions();
UPDATE qdo.about SET format = '1', oldest = '1', tables = '77fa3f7e5325bb7b', functions = '8392022c579ac427';
