CREATE SCHEMA relay;
ALTER SCHEMA relay OWNER TO relay_owner;

CREATE FUNCTION relay.backlog(p_tenant text) RETURNS TABLE(relay_id text, ready bigint, delayed bigint, claimed bigint, oldest interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.backlog(p_tenant text) OWNER TO relay_api;

CREATE FUNCTION relay.bind_tenant(p_tenant text, p_relay text DEFAULT NULL::text, p_kinds text[] DEFAULT NULL::text[]) RETURNS text
    LANGUAGE plpgsql
    SET enable_indexscan TO 'on'
    AS $$ … $$;
ALTER FUNCTION relay.bind_tenant(p_tenant text, p_relay text, p_kinds text[]) OWNER TO relay_api;

CREATE FUNCTION relay.bound_tenant() RETURNS text
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.bound_tenant() OWNER TO relay_owner;

CREATE FUNCTION relay.channel(p_kind text, p_tenant text, p_relay text DEFAULT NULL::text) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.channel(p_kind text, p_tenant text, p_relay text) OWNER TO relay_api;

CREATE FUNCTION relay.channel_name(p_kind text, p_tenant text, p_relay text) RETURNS text
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.channel_name(p_kind text, p_tenant text, p_relay text) OWNER TO relay_api;

CREATE FUNCTION relay.check_json(p_what text, p_json jsonb, p_most text) RETURNS void
    LANGUAGE plpgsql STABLE
    AS $$ … $$;
ALTER FUNCTION relay.check_json(p_what text, p_json jsonb, p_most text) OWNER TO relay_api;

CREATE FUNCTION relay.check_parts(p_headers text[], p_bodies bytea[], p_codes text[], p_messages text[]) RETURNS void
    LANGUAGE plpgsql STABLE
    AS $$ … $$;
ALTER FUNCTION relay.check_parts(p_headers text[], p_bodies bytea[], p_codes text[], p_messages text[]) OWNER TO relay_api;

CREATE FUNCTION relay.check_size(p_what text, p_bytes bigint, p_most text) RETURNS void
    LANGUAGE plpgsql STABLE
    AS $$ … $$;
ALTER FUNCTION relay.check_size(p_what text, p_bytes bigint, p_most text) OWNER TO relay_api;

CREATE FUNCTION relay.claim(p_relay text, p_tenants text[], p_limit bigint, p_claimed_by text, p_claim_id uuid, p_lease interval, p_after bigint[] DEFAULT NULL::bigint[], p_start bigint DEFAULT 0, p_body_limit bigint DEFAULT 65536, p_batch_limit bigint DEFAULT 4194304, p_sweep interval DEFAULT NULL::interval) RETURNS TABLE(outcome text, tenant_id text, job_id uuid, operation text, headers text, body bytea, body_bytes bigint, attempt bigint, max_attempts bigint, fence bigint, seq bigint, created_at timestamp with time zone, expires_at timestamp with time zone, remaining interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.claim(p_relay text, p_tenants text[], p_limit bigint, p_claimed_by text, p_claim_id uuid, p_lease interval, p_after bigint[], p_start bigint, p_body_limit bigint, p_batch_limit bigint, p_sweep interval) OWNER TO relay_api;

CREATE FUNCTION relay.claim_again(p_relay text, p_tenants text[], p_claimed_by text, p_claim_id uuid, p_body_limit bigint DEFAULT 65536, p_batch_limit bigint DEFAULT 4194304) RETURNS TABLE(outcome text, tenant_id text, job_id uuid, operation text, headers text, body bytea, body_bytes bigint, attempt bigint, max_attempts bigint, fence bigint, seq bigint, created_at timestamp with time zone, expires_at timestamp with time zone, remaining interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.claim_again(p_relay text, p_tenants text[], p_claimed_by text, p_claim_id uuid, p_body_limit bigint, p_batch_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.claim_turn(p_tenant text, p_relay text) RETURNS interval
    LANGUAGE plpgsql
    SET lock_timeout TO '400ms'
    AS $$ … $$;
ALTER FUNCTION relay.claim_turn(p_tenant text, p_relay text) OWNER TO relay_api;

CREATE FUNCTION relay.complete(p_relay text, p_claimed_by text, p_tenants text[], p_counts bigint[], p_job_ids uuid[], p_fences bigint[], p_statuses text[], p_response_statuses bigint[], p_response_headers text[], p_response_bodies bytea[], p_error_codes text[], p_error_messages text[], p_notify boolean DEFAULT false) RETURNS TABLE(n bigint, outcome text, status text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.complete(p_relay text, p_claimed_by text, p_tenants text[], p_counts bigint[], p_job_ids uuid[], p_fences bigint[], p_statuses text[], p_response_statuses bigint[], p_response_headers text[], p_response_bodies bytea[], p_error_codes text[], p_error_messages text[], p_notify boolean) OWNER TO relay_api;

CREATE FUNCTION relay.confirm_commit() RETURNS void
    LANGUAGE plpgsql
    AS $$ … $$;
ALTER FUNCTION relay.confirm_commit() OWNER TO relay_api;

CREATE FUNCTION relay.drop_jobs(p_tenant text, p_results tid[], p_requests tid[], p_keys tid[]) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.drop_jobs(p_tenant text, p_results tid[], p_requests tid[], p_keys tid[]) OWNER TO relay_api;

CREATE FUNCTION relay.durable_abandon(p_tenant text, p_job_id uuid) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_abandon(p_tenant text, p_job_id uuid) OWNER TO relay_api;

CREATE FUNCTION relay.durable_all_tenants() RETURNS TABLE(tenant_id text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_all_tenants() OWNER TO relay_sweep;

CREATE FUNCTION relay.durable_candidates(p_tenant text, p_kinds text[], p_limit bigint, p_job_id uuid DEFAULT NULL::uuid) RETURNS TABLE(job_id uuid, seq bigint, lease_version bigint)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_candidates(p_tenant text, p_kinds text[], p_limit bigint, p_job_id uuid) OWNER TO relay_api;

CREATE FUNCTION relay.durable_check_event(p_actor text, p_channel text, p_holder text, p_detail jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$ … $$;
ALTER FUNCTION relay.durable_check_event(p_actor text, p_channel text, p_holder text, p_detail jsonb) OWNER TO relay_api;

CREATE FUNCTION relay.durable_check_extra(p_extra jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$ … $$;
ALTER FUNCTION relay.durable_check_extra(p_extra jsonb) OWNER TO relay_api;

CREATE FUNCTION relay.durable_checkpoint(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_checkpoint jsonb, p_rows_done bigint DEFAULT NULL::bigint, p_rows_failed bigint DEFAULT NULL::bigint, p_lease interval DEFAULT NULL::interval) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_checkpoint(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_checkpoint jsonb, p_rows_done bigint, p_rows_failed bigint, p_lease interval) OWNER TO relay_api;

CREATE FUNCTION relay.durable_chunks(p_tenant text, p_job_id uuid, p_seqs bigint[] DEFAULT NULL::bigint[], p_after bigint DEFAULT 0, p_limit bigint DEFAULT 1000, p_status text DEFAULT NULL::text) RETURNS TABLE(job_id uuid, seq bigint, payload text, status text, attempts bigint, lease_version bigint, lease_expires_at timestamp with time zone, claimed_by text, claimed_at timestamp with time zone, available_at timestamp with time zone, checkpoint text, outcome text, rows_total bigint, rows_done bigint, rows_failed bigint, last_error text, created_at timestamp with time zone, updated_at timestamp with time zone, ended_at timestamp with time zone)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_chunks(p_tenant text, p_job_id uuid, p_seqs bigint[], p_after bigint, p_limit bigint, p_status text) OWNER TO relay_api;

CREATE FUNCTION relay.durable_claim(p_tenants text[], p_kinds text[], p_limits bigint[], p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval, p_start bigint DEFAULT 0, p_after jsonb DEFAULT NULL::jsonb, p_job_id uuid DEFAULT NULL::uuid) RETURNS TABLE(outcome text, tenant_id text, job_id uuid, seq bigint, kind text, params text, idempotent boolean, max_attempts bigint, payload text, checkpoint text, attempts bigint, lease_version bigint, rows_total bigint, rows_done bigint, rows_failed bigint, lease_expires_at timestamp with time zone, wait interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_claim(p_tenants text[], p_kinds text[], p_limits bigint[], p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval, p_start bigint, p_after jsonb, p_job_id uuid) OWNER TO relay_api;

CREATE FUNCTION relay.durable_claim_again(p_tenants text[], p_token uuid) RETURNS TABLE(outcome text, tenant_id text, job_id uuid, seq bigint, kind text, params text, idempotent boolean, max_attempts bigint, payload text, checkpoint text, attempts bigint, lease_version bigint, rows_total bigint, rows_done bigint, rows_failed bigint, lease_expires_at timestamp with time zone, wait interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_claim_again(p_tenants text[], p_token uuid) OWNER TO relay_api;

CREATE FUNCTION relay.durable_claim_chunk(p_tenant text, p_job_id uuid, p_seq bigint, p_lease_version bigint, p_claimed_by text, p_token uuid, p_lease interval) RETURNS TABLE(outcome text, tenant_id text, job_id uuid, seq bigint, kind text, params text, idempotent boolean, max_attempts bigint, payload text, checkpoint text, attempts bigint, lease_version bigint, rows_total bigint, rows_done bigint, rows_failed bigint, lease_expires_at timestamp with time zone, wait interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_claim_chunk(p_tenant text, p_job_id uuid, p_seq bigint, p_lease_version bigint, p_claimed_by text, p_token uuid, p_lease interval) OWNER TO relay_api;

CREATE FUNCTION relay.durable_claim_next(p_tenant text, p_job_id uuid, p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval) RETURNS TABLE(outcome text, tenant_id text, job_id uuid, seq bigint, kind text, params text, idempotent boolean, max_attempts bigint, payload text, checkpoint text, attempts bigint, lease_version bigint, rows_total bigint, rows_done bigint, rows_failed bigint, lease_expires_at timestamp with time zone, wait interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_claim_next(p_tenant text, p_job_id uuid, p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval) OWNER TO relay_api;

CREATE FUNCTION relay.durable_complete(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_outcome jsonb, p_rows_done bigint DEFAULT NULL::bigint, p_rows_failed bigint DEFAULT NULL::bigint, OUT outcome text, OUT last boolean) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_complete(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_outcome jsonb, p_rows_done bigint, p_rows_failed bigint, OUT outcome text, OUT last boolean) OWNER TO relay_api;

CREATE FUNCTION relay.durable_complete_all(p_tenant text, p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[], p_rows_done bigint[], p_rows_failed bigint[], OUT ns bigint[], OUT lasts boolean[], OUT rest bigint[], OUT rest_outcomes text[], OUT rest_lasts boolean[]) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_complete_all(p_tenant text, p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[], p_rows_done bigint[], p_rows_failed bigint[], OUT ns bigint[], OUT lasts boolean[], OUT rest bigint[], OUT rest_outcomes text[], OUT rest_lasts boolean[]) OWNER TO relay_api;

CREATE FUNCTION relay.durable_complete_many(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[], p_rows_done bigint[] DEFAULT NULL::bigint[], p_rows_failed bigint[] DEFAULT NULL::bigint[]) RETURNS TABLE(places bigint[], outcome text, last boolean)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_complete_many(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[], p_rows_done bigint[], p_rows_failed bigint[]) OWNER TO relay_api;

CREATE FUNCTION relay.durable_complete_one(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_outcome jsonb, p_rows_done bigint, p_rows_failed bigint, OUT outcome text, OUT last boolean) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_complete_one(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_outcome jsonb, p_rows_done bigint, p_rows_failed bigint, OUT outcome text, OUT last boolean) OWNER TO relay_api;

CREATE FUNCTION relay.durable_conclude(p_tenant text, p_job_id uuid, p_actor text, p_channel text, p_empty boolean DEFAULT false, p_count boolean DEFAULT true) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_conclude(p_tenant text, p_job_id uuid, p_actor text, p_channel text, p_empty boolean, p_count boolean) OWNER TO relay_api;

CREATE FUNCTION relay.durable_control(p_tenant text, p_job_id uuid, p_action text, p_actor text DEFAULT NULL::text, p_channel text DEFAULT NULL::text, p_note text DEFAULT NULL::text, p_after bigint DEFAULT 0) RETURNS TABLE(outcome text, was text, status text, chunks bigint, running bigint, upto bigint)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_control(p_tenant text, p_job_id uuid, p_action text, p_actor text, p_channel text, p_note text, p_after bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_count(p_tenant text, p_job_id uuid) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_count(p_tenant text, p_job_id uuid) OWNER TO relay_api;

CREATE FUNCTION relay.durable_done(p_tenant text, p_at timestamp with time zone, p_rows tid[], p_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[], p_rows_done bigint[], p_rows_failed bigint[], p_jobs uuid[], p_lasts boolean[]) RETURNS TABLE(n bigint, last boolean)
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_done(p_tenant text, p_at timestamp with time zone, p_rows tid[], p_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[], p_rows_done bigint[], p_rows_failed bigint[], p_jobs uuid[], p_lasts boolean[]) OWNER TO relay_api;

CREATE FUNCTION relay.durable_drop(p_tenant text, p_chunks tid[], p_errors tid[], p_events tid[], p_jobs tid[]) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_drop(p_tenant text, p_chunks tid[], p_errors tid[], p_events tid[], p_jobs tid[]) OWNER TO relay_api;

CREATE FUNCTION relay.durable_events(p_tenant text, p_job_id uuid, p_after text, p_limit bigint) RETURNS TABLE(xid text, n bigint, at timestamp with time zone, seq bigint, type text, actor text, channel text, holder text, detail text, next_cursor text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_events(p_tenant text, p_job_id uuid, p_after text, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_fail(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_message text, p_retryable boolean, p_delay interval DEFAULT NULL::interval, OUT status text, OUT last boolean) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_fail(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_message text, p_retryable boolean, p_delay interval, OUT status text, OUT last boolean) OWNER TO relay_api;

CREATE FUNCTION relay.durable_finish(p_tenant text, p_job_ids uuid[]) RETURNS TABLE(job_id uuid, status text, ended boolean)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_finish(p_tenant text, p_job_ids uuid[]) OWNER TO relay_api;

CREATE FUNCTION relay.durable_finish_lost(p_tenant text, p_limit bigint) RETURNS TABLE(tenant_id text, job_id uuid, status text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_finish_lost(p_tenant text, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_has_open(p_tenant text, p_job_id uuid) RETURNS boolean
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_has_open(p_tenant text, p_job_id uuid) OWNER TO relay_api;

CREATE FUNCTION relay.durable_health(p_tenant text) RETURNS TABLE(review bigint, review_chunks bigint, review_kinds text[], review_for interval, lost bigint, lost_for interval, idle bigint, idle_kinds text[], idle_for interval, paused bigint)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_health(p_tenant text) OWNER TO relay_api;

CREATE FUNCTION relay.durable_heartbeat(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_lease interval, p_rows_done bigint[] DEFAULT NULL::bigint[]) RETURNS TABLE(places bigint[], outcome text, job_status text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_heartbeat(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_lease interval, p_rows_done bigint[]) OWNER TO relay_api;

CREATE FUNCTION relay.durable_hold(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, OUT row_id tid, OUT at timestamp with time zone, OUT attempts bigint, OUT holder text, OUT most bigint) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_hold(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, OUT row_id tid, OUT at timestamp with time zone, OUT attempts bigint, OUT holder text, OUT most bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_insert_chunks(p_tenant text, p_job_id uuid, p_chunks jsonb, p_from bigint DEFAULT NULL::bigint, p_notify boolean DEFAULT true) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'on'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $_$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz;
  v_status text;
  v_from   bigint := p_from;
  v_last   bigint;
  v_count  bigint;
  v_rows   bigint;
begin
  if jsonb_typeof(p_chunks) is distinct from 'array' or p_from < 1 then
    raise exception 'the chunks must be a JSON array, and their numbers begin at 1 or later' using errcode = 'S2020';
  end if;
  if jsonb_path_exists(
       p_chunks, '$[*] ? (@.type() != "object" || !exists (@.payload) || exists (@.rows ? (@.type() != "number" || @ < 0
                          || @ != @.floor()) ? (@.type() != "null")))') then
    raise exception 'each chunk needs a payload (a JSON null is one), and rows, if any, are a whole number' using errcode = 'S2020';
  end if;
  -- A claim brings the payloads of several tenants as text, and one that PostgreSQL cannot make would fail it for all.
  perform relay.check_size('a payload', (select max(octet_length((e.value -> 'payload')::text))
                                         from jsonb_array_elements(p_chunks) as e (value)), 'value');
  select j.status into v_status from relay.durable_job j
  where j.tenant_id = v_tenant and j.job_id = p_job_id for no key update;
  if v_status is null or v_status = 'removing' then
    raise exception 'no such durable job' using errcode = 'S2030';
  elsif v_status not in ('submitting', 'queued', 'running', 'paused') then
    raise exception 'the job is % and takes no chunks', v_status using errcode = 'S2042';
  end if;
  v_now := clock_timestamp();
  -- Under the job's lock: nobody else adds chunks to it.
  v_last := coalesce((select c.seq from relay.durable_chunk c
                      where c.tenant_id = v_tenant and c.job_id = p_job_id order by c.seq desc limit 1), 0);
  v_from := coalesce(v_from, v_last + 1);
  with stored as (
    insert into relay.durable_chunk (tenant_id, job_id, seq, payload, status, rows_total, created_at, updated_at)
    select v_tenant, p_job_id, v_from + e.n - 1, e.value -> 'payload', 'pending', coalesce((e.value ->> 'rows')::bigint, 0),
           v_now, v_now
    from jsonb_array_elements(p_chunks) with ordinality as e (value, n)
    -- Not by a conflict of keys: that would wait for a handler's transaction that has such a chunk, with the job locked.
    where v_from + e.n - 1 > v_last
       or not exists (select from relay.durable_chunk c
                      where c.tenant_id = v_tenant and c.job_id = p_job_id and c.seq = v_from + e.n - 1)
    returning rows_total)
  select count(*), coalesce(sum(s.rows_total), 0) into v_count, v_rows from stored s;
  if v_count > 0 then
    update relay.durable_job j
    set updated_at = v_now, chunks_total = j.chunks_total + v_count, chunks_pending = j.chunks_pending + v_count,
        rows_total = j.rows_total + v_rows
    where j.tenant_id = v_tenant and j.job_id = p_job_id;
    if p_notify and v_status <> 'submitting' then
      perform relay.durable_ring(v_tenant, array[p_job_id], v_status <> 'paused');
    end if;
  end if;
  perform relay.unbind_tenant(v_before);
  return v_count;
end $_$;
ALTER FUNCTION relay.durable_insert_chunks(p_tenant text, p_job_id uuid, p_chunks jsonb, p_from bigint, p_notify boolean) OWNER TO relay_api;

CREATE FUNCTION relay.durable_insert_job(p_tenant text, p_job_id uuid, p_kind text, p_params jsonb, p_idempotent boolean, p_max_attempts bigint, p_priority bigint, p_created_by text, p_submitting boolean DEFAULT false) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'on'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_insert_job(p_tenant text, p_job_id uuid, p_kind text, p_params jsonb, p_idempotent boolean, p_max_attempts bigint, p_priority bigint, p_created_by text, p_submitting boolean) OWNER TO relay_api;

CREATE FUNCTION relay.durable_is_last(p_tenant text, p_job_id uuid) RETURNS boolean
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_is_last(p_tenant text, p_job_id uuid) OWNER TO relay_api;

CREATE FUNCTION relay.durable_jobs(p_tenant text, p_job_ids uuid[], p_fresh boolean DEFAULT false) RETURNS TABLE(job_id uuid, kind text, params text, idempotent boolean, max_attempts bigint, priority bigint, status text, rows_total bigint, rows_done bigint, rows_failed bigint, chunks_total bigint, chunks_pending bigint, chunks_running bigint, chunks_retry bigint, chunks_done bigint, chunks_failed bigint, chunks_needs_review bigint, chunks_cancelled bigint, counted_at timestamp with time zone, last_error text, created_by text, created_at timestamp with time zone, started_at timestamp with time zone, ended_at timestamp with time zone, updated_at timestamp with time zone)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_jobs(p_tenant text, p_job_ids uuid[], p_fresh boolean) OWNER TO relay_api;

CREATE FUNCTION relay.durable_matches(p_value jsonb, p_kind text, p_op text, p_wanted jsonb) RETURNS boolean
    LANGUAGE plpgsql STABLE
    AS $$ … $$;
ALTER FUNCTION relay.durable_matches(p_value jsonb, p_kind text, p_op text, p_wanted jsonb) OWNER TO relay_api;

CREATE FUNCTION relay.durable_may(p_from text, p_to text) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE
    AS $$ … $$;
ALTER FUNCTION relay.durable_may(p_from text, p_to text) OWNER TO relay_api;

CREATE FUNCTION relay.durable_meets(p_row jsonb, p_filter jsonb, p_kinds jsonb) RETURNS boolean
    LANGUAGE plpgsql STABLE
    AS $$ … $$;
ALTER FUNCTION relay.durable_meets(p_row jsonb, p_filter jsonb, p_kinds jsonb) OWNER TO relay_api;

CREATE FUNCTION relay.durable_move(p_tenant text, p_at timestamp with time zone, p_rows tid[], p_status text, p_attempts text, p_available_at timestamp with time zone, p_error text) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_move(p_tenant text, p_at timestamp with time zone, p_rows tid[], p_status text, p_attempts text, p_available_at timestamp with time zone, p_error text) OWNER TO relay_api;

CREATE FUNCTION relay.durable_promote(p_tenant text, p_limit bigint) RETURNS interval
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_promote(p_tenant text, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_query(p_tenant text, p_table text, p_filter jsonb DEFAULT '[]'::jsonb, p_job_id uuid DEFAULT NULL::uuid, p_after jsonb DEFAULT NULL::jsonb, p_limit bigint DEFAULT 100) RETURNS TABLE(item text, after text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_query(p_tenant text, p_table text, p_filter jsonb, p_job_id uuid, p_after jsonb, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_reap(p_tenant text, p_reaper text, p_limit bigint) RETURNS TABLE(tenant_id text, job_id uuid, seq bigint, status text, attempts bigint, lease_version bigint, holder text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_reap(p_tenant text, p_reaper text, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_record_event(p_tenant text, p_job_id uuid, p_seq bigint, p_type text, p_actor text, p_channel text, p_holder text, p_detail jsonb) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_record_event(p_tenant text, p_job_id uuid, p_seq bigint, p_type text, p_actor text, p_channel text, p_holder text, p_detail jsonb) OWNER TO relay_api;

CREATE FUNCTION relay.durable_recount(p_tenant text, p_job_id uuid) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_recount(p_tenant text, p_job_id uuid) OWNER TO relay_api;

CREATE FUNCTION relay.durable_refresh_counters(p_tenant text, p_job_id uuid) RETURNS TABLE(status text, rows_total bigint, rows_done bigint, rows_failed bigint, chunks_total bigint, chunks_pending bigint, chunks_running bigint, chunks_retry bigint, chunks_done bigint, chunks_failed bigint, chunks_needs_review bigint, chunks_cancelled bigint, counted_at timestamp with time zone)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.durable_refresh_counters(p_tenant text, p_job_id uuid) OWNER TO relay_api;

CREATE FUNCTION relay.durable_release(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_to text DEFAULT 'pending'::text, p_notify boolean DEFAULT false) RETURNS TABLE(n bigint, outcome text, status text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_release(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_to text, p_notify boolean) OWNER TO relay_api;

CREATE FUNCTION relay.durable_remove(p_tenant text, p_limit bigint) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_remove(p_tenant text, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_renew(p_tenant text, p_rows tid[], p_rows_done bigint[], p_until timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_renew(p_tenant text, p_rows tid[], p_rows_done bigint[], p_until timestamp with time zone) OWNER TO relay_api;

CREATE FUNCTION relay.durable_resolve(p_tenant text, p_job_id uuid, p_seq bigint, p_decision text, p_actor text, p_channel text DEFAULT NULL::text, p_note text DEFAULT NULL::text, OUT outcome text, OUT chunk_status text, OUT status text) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_resolve(p_tenant text, p_job_id uuid, p_seq bigint, p_decision text, p_actor text, p_channel text, p_note text, OUT outcome text, OUT chunk_status text, OUT status text) OWNER TO relay_api;

CREATE FUNCTION relay.durable_retire(p_tenant text, p_keep interval, p_abandoned interval, p_limit bigint) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_retire(p_tenant text, p_keep interval, p_abandoned interval, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_ring(p_tenant text, p_jobs uuid[], p_work boolean) RETURNS void
    LANGUAGE plpgsql
    SET trace_notify TO 'off'
    AS $$ … $$;
ALTER FUNCTION relay.durable_ring(p_tenant text, p_jobs uuid[], p_work boolean) OWNER TO relay_api;

CREATE FUNCTION relay.durable_row_errors(p_tenant text, p_job_id uuid, p_limit bigint, p_after_seq bigint DEFAULT 0, p_after_row bigint DEFAULT '-9223372036854775808'::bigint, p_after_code text DEFAULT ''::text, p_seq bigint DEFAULT NULL::bigint) RETURNS TABLE(seq bigint, row_no bigint, code text, message text, data text, lease_version bigint, created_at timestamp with time zone)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_row_errors(p_tenant text, p_job_id uuid, p_limit bigint, p_after_seq bigint, p_after_row bigint, p_after_code text, p_seq bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_row_errors_add(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_errors jsonb) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $_$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{worker}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_row    record;
  v_now    timestamptz;
  v_count  bigint;
begin
  if jsonb_typeof(p_errors) is distinct from 'array'
     or jsonb_path_exists(p_errors, '$[*] ? (@.type() != "object" || !exists (@.row ? (@.type() == "number")))') then
    raise exception 'row errors are a JSON array of objects with a row number' using errcode = 'S2020';
  end if;
  -- Of a page that somebody reads each has its data.
  perform relay.check_size('the code of a row error', max(octet_length(u.value ->> 'code')), '200'),
          relay.check_size('the message of a row error', max(octet_length(u.value ->> 'message')), '8192'),
          relay.check_size('the data of a row error', max(octet_length((u.value -> 'data')::text)), '131072')
  from jsonb_array_elements(p_errors) as u (value);
  v_row := relay.durable_hold(v_tenant, p_job_id, p_seq, p_token, p_version);
  if v_row.row_id is null then
    raise exception 'the lease of this chunk is lost' using errcode = 'S2041';
  end if;
  v_now := v_row.at;
  with stored as (
    insert into relay.durable_row_error (tenant_id, job_id, seq, row_no, code, message, data, lease_version, created_at)
    select v_tenant, p_job_id, p_seq, e.row_no, e.code, e.message, e.data, p_version, v_now
    from (select distinct on (1, 2) (u.value ->> 'row')::bigint as row_no, coalesce(u.value ->> 'code', '') as code,
                 coalesce(u.value ->> 'message', '') as message, u.value -> 'data' as data
          from jsonb_array_elements(p_errors) with ordinality as u (value, i) order by 1, 2, u.i desc) e
    on conflict (tenant_id, job_id, seq, row_no, code)
      do update set message = excluded.message, data = excluded.data, lease_version = excluded.lease_version,
                    created_at = excluded.created_at
    returning 1)
  select count(*) into v_count from stored;
  perform relay.unbind_tenant(v_before);
  return v_count;
end $_$;
ALTER FUNCTION relay.durable_row_errors_add(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_errors jsonb) OWNER TO relay_api;

CREATE FUNCTION relay.durable_run_sweeps(p_reaper text, p_limit bigint, p_lease interval, p_keep interval, p_abandoned interval, p_every interval[]) RETURNS TABLE(sweep text, tenant_id text, job_id uuid, seq bigint, status text)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.durable_run_sweeps(p_reaper text, p_limit bigint, p_lease interval, p_keep interval, p_abandoned interval, p_every interval[]) OWNER TO relay_api;

CREATE FUNCTION relay.durable_seal(p_tenant text, p_job_id uuid, p_chunks bigint DEFAULT NULL::bigint, p_notify boolean DEFAULT true) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'on'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_seal(p_tenant text, p_job_id uuid, p_chunks bigint, p_notify boolean) OWNER TO relay_api;

CREATE FUNCTION relay.durable_set_chunk_statuses(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb DEFAULT '{}'::jsonb, p_seqs bigint[] DEFAULT NULL::bigint[]) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_set_chunk_statuses(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb, p_seqs bigint[]) OWNER TO relay_api;

CREATE FUNCTION relay.durable_set_job_status(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb DEFAULT '{}'::jsonb, p_event jsonb DEFAULT NULL::jsonb) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_set_job_status(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb, p_event jsonb) OWNER TO relay_api;

CREATE FUNCTION relay.durable_snapshot() RETURNS pg_snapshot
    LANGUAGE plpgsql STABLE
    AS $$ … $$;
ALTER FUNCTION relay.durable_snapshot() OWNER TO relay_api;

CREATE FUNCTION relay.durable_start(p_tenant text, p_job_id uuid, p_holder text) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_start(p_tenant text, p_job_id uuid, p_holder text) OWNER TO relay_api;

CREATE FUNCTION relay.durable_sweep_chunks(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_attempts text, p_seqs bigint[], p_error text, p_after bigint DEFAULT 0, p_limit bigint DEFAULT NULL::bigint, OUT moved bigint, OUT last bigint) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET lock_timeout TO '1s'
    AS $$ … $$;
ALTER FUNCTION relay.durable_sweep_chunks(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_attempts text, p_seqs bigint[], p_error text, p_after bigint, p_limit bigint, OUT moved bigint, OUT last bigint) OWNER TO relay_api;

CREATE FUNCTION relay.durable_sweep_turn(p_name text, p_every interval) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_sweep_turn(p_name text, p_every interval) OWNER TO relay_api;

CREATE FUNCTION relay.durable_tell(p_tenant text, p_job_id uuid, p_type text, p_seqs bigint[], p_actor text, p_channel text, p_holders text[], p_details jsonb[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_tell(p_tenant text, p_job_id uuid, p_type text, p_seqs bigint[], p_actor text, p_channel text, p_holders text[], p_details jsonb[]) OWNER TO relay_api;

CREATE FUNCTION relay.durable_tenants(p_kinds text[] DEFAULT NULL::text[]) RETURNS TABLE(tenant_id text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_tenants(p_kinds text[]) OWNER TO relay_sweep;

CREATE FUNCTION relay.durable_tenants_due(p_name text, p_keep interval, p_abandoned interval) RETURNS TABLE(tenant_id text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.durable_tenants_due(p_name text, p_keep interval, p_abandoned interval) OWNER TO relay_sweep;

CREATE FUNCTION relay.durable_turn_to(p_tenant text, p_job_id uuid, p_status text) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_turn_to(p_tenant text, p_job_id uuid, p_status text) OWNER TO relay_api;

CREATE FUNCTION relay.durable_turns() RETURNS TABLE(name text, next_due_at timestamp with time zone)
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.durable_turns() OWNER TO relay_api;

CREATE FUNCTION relay.durable_update_job(p_tenant text, p_job_id uuid, p_extra jsonb) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_update_job(p_tenant text, p_job_id uuid, p_extra jsonb) OWNER TO relay_api;

CREATE FUNCTION relay.durable_write_extra(p_tenant text, p_job_id uuid, p_extra jsonb) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.durable_write_extra(p_tenant text, p_job_id uuid, p_extra jsonb) OWNER TO relay_api;

CREATE FUNCTION relay.end_jobs(p_tenant text, p_at timestamp with time zone, p_by_holder boolean, p_late text, p_ns bigint[], p_rows tid[], p_status text DEFAULT NULL::text, p_statuses text[] DEFAULT NULL::text[], p_response_statuses bigint[] DEFAULT NULL::bigint[], p_response_headers text[] DEFAULT NULL::text[], p_response_bodies bytea[] DEFAULT NULL::bytea[], p_error_codes text[] DEFAULT NULL::text[], p_error_messages text[] DEFAULT NULL::text[]) RETURNS TABLE(n bigint, job_id uuid, relay_id text, status text, claimed_by text, attempt bigint, max_attempts bigint, fence bigint, seq bigint, created_at timestamp with time zone, expires_at timestamp with time zone)
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.end_jobs(p_tenant text, p_at timestamp with time zone, p_by_holder boolean, p_late text, p_ns bigint[], p_rows tid[], p_status text, p_statuses text[], p_response_statuses bigint[], p_response_headers text[], p_response_bodies bytea[], p_error_codes text[], p_error_messages text[]) OWNER TO relay_api;

CREATE FUNCTION relay.enqueue(p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[], p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamp with time zone[], p_delays interval[], p_notify boolean DEFAULT false) RETURNS uuid[]
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.enqueue(p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[], p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamp with time zone[], p_delays interval[], p_notify boolean) OWNER TO relay_api;

CREATE FUNCTION relay.enqueue_bounded(p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[], p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamp with time zone[], p_delays interval[], p_max_pending bigint[], p_whole boolean DEFAULT true, p_notify boolean DEFAULT false) RETURNS TABLE(outcome text, job_id uuid, relay_id text, pending bigint, retry_after interval, took interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.enqueue_bounded(p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[], p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamp with time zone[], p_delays interval[], p_max_pending bigint[], p_whole boolean, p_notify boolean) OWNER TO relay_api;

CREATE FUNCTION relay.enqueue_keyed(p_tenant text, p_job_id uuid, p_relay_id text, p_operation text, p_headers text, p_body bytea, p_max_attempts bigint, p_ttl interval, p_expires_at timestamp with time zone, p_delay interval, p_key text, p_lock_timeout interval DEFAULT '00:00:05'::interval, p_notify boolean DEFAULT false) RETURNS TABLE(job_id uuid, duplicate boolean)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '5s'
    AS $$ … $$;
ALTER FUNCTION relay.enqueue_keyed(p_tenant text, p_job_id uuid, p_relay_id text, p_operation text, p_headers text, p_body bytea, p_max_attempts bigint, p_ttl interval, p_expires_at timestamp with time zone, p_delay interval, p_key text, p_lock_timeout interval, p_notify boolean) OWNER TO relay_api;

CREATE FUNCTION relay.enqueue_keyed_bounded(p_tenant text, p_job_id uuid, p_relay_id text, p_operation text, p_headers text, p_body bytea, p_max_attempts bigint, p_ttl interval, p_expires_at timestamp with time zone, p_delay interval, p_key text, p_max_pending bigint, p_lock_timeout interval DEFAULT '00:00:05'::interval, p_notify boolean DEFAULT false) RETURNS TABLE(job_id uuid, duplicate boolean, pending bigint, retry_after interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.enqueue_keyed_bounded(p_tenant text, p_job_id uuid, p_relay_id text, p_operation text, p_headers text, p_body bytea, p_max_attempts bigint, p_ttl interval, p_expires_at timestamp with time zone, p_delay interval, p_key text, p_max_pending bigint, p_lock_timeout interval, p_notify boolean) OWNER TO relay_api;

CREATE FUNCTION relay.expire_late(p_tenant text, p_relay text, p_limit bigint) RETURNS TABLE(tenant_id text, relay_id text, job_id uuid, status text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.expire_late(p_tenant text, p_relay text, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.fetch_body(p_relay text, p_tenant text, p_job_id uuid, p_fence bigint, p_claimed_by text) RETURNS TABLE(body bytea)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.fetch_body(p_relay text, p_tenant text, p_job_id uuid, p_fence bigint, p_claimed_by text) OWNER TO relay_api;

CREATE FUNCTION relay.grant_binding(p_login text, p_kind text, p_tenant text, p_relay text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.grant_binding(p_login text, p_kind text, p_tenant text, p_relay text) OWNER TO relay_api;

CREATE FUNCTION relay.heartbeat(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_lease interval) RETURNS TABLE(n bigint, outcome text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.heartbeat(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_lease interval) OWNER TO relay_api;

CREATE FUNCTION relay.list_jobs(p_tenant text, p_relay text DEFAULT NULL::text, p_status text DEFAULT NULL::text, p_limit bigint DEFAULT 50, p_before uuid DEFAULT NULL::uuid) RETURNS TABLE(job_id uuid, relay_id text, operation text, status text, attempt bigint, max_attempts bigint, claimed_by text, error_code text, created_at timestamp with time zone, completed_at timestamp with time zone, expires_at timestamp with time zone)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.list_jobs(p_tenant text, p_relay text, p_status text, p_limit bigint, p_before uuid) OWNER TO relay_api;

CREATE FUNCTION relay.login_is(p_kinds text[], p_tenant text) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.login_is(p_kinds text[], p_tenant text) OWNER TO relay_api;

CREATE FUNCTION relay.mark_expired(p_tenant text, p_job_ids uuid[]) RETURNS TABLE(n bigint, outcome text, relay_id text, was_claimed boolean)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.mark_expired(p_tenant text, p_job_ids uuid[]) OWNER TO relay_api;

CREATE FUNCTION relay.my_bindings() RETURNS TABLE(kind text, tenant_id text, relay_id text)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.my_bindings() OWNER TO relay_api;

CREATE FUNCTION relay.notify(p_channel text, p_payload text) RETURNS void
    LANGUAGE plpgsql
    SET trace_notify TO 'off'
    AS $$ … $$;
ALTER FUNCTION relay.notify(p_channel text, p_payload text) OWNER TO relay_api;

CREATE FUNCTION relay.now() RETURNS timestamp with time zone
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.now() OWNER TO relay_api;

CREATE FUNCTION relay.outbox_back(p_tenant text, p_at timestamp with time zone, p_ns bigint[], p_rows tid[], p_outcomes text[], p_errors text[], p_delays interval[], p_max_attempts bigint, p_suspect boolean) RETURNS TABLE(n bigint, event_id uuid, kind text, key text, state text)
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_back(p_tenant text, p_at timestamp with time zone, p_ns bigint[], p_rows tid[], p_outcomes text[], p_errors text[], p_delays interval[], p_max_attempts bigint, p_suspect boolean) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_choose(p_tenant text, p_at timestamp with time zone, p_rows tid[], p_oldest timestamp with time zone, p_bytes bigint, p_first boolean) RETURNS TABLE(take tid[], size bigint, parked uuid[], whole boolean, alone boolean)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_choose(p_tenant text, p_at timestamp with time zone, p_rows tid[], p_oldest timestamp with time zone, p_bytes bigint, p_first boolean) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_claim(p_tenants text[], p_kinds text[], p_after timestamp with time zone[], p_limit bigint, p_claimed_by text, p_max_bytes bigint DEFAULT 8388608, p_horizon interval DEFAULT '3 days'::interval) RETURNS TABLE(outcome text, tenant_id text, kind text, event_ids uuid[], payloads text[], created_at timestamp with time zone[], keys text[], fences bigint[], attempts bigint[], last timestamp with time zone)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_claim(p_tenants text[], p_kinds text[], p_after timestamp with time zone[], p_limit bigint, p_claimed_by text, p_max_bytes bigint, p_horizon interval) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_count(p_tenant text, p_state text DEFAULT NULL::text, p_kind text DEFAULT NULL::text, p_key text DEFAULT NULL::text, p_older interval DEFAULT NULL::interval, p_before uuid DEFAULT NULL::uuid, p_limit bigint DEFAULT 100000) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_count(p_tenant text, p_state text, p_kind text, p_key text, p_older interval, p_before uuid, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_drop(p_tenant text, p_rows tid[]) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_drop(p_tenant text, p_rows tid[]) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_due(p_tenants text[], p_kinds text[], p_limit bigint, p_start text, p_stale interval, p_max_attempts bigint, p_look bigint, p_look_tenants text[], p_look_keys text[]) RETURNS TABLE(outcome text, tenant_id text, kind text, key text, wait interval, amount bigint)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_due(p_tenants text[], p_kinds text[], p_limit bigint, p_start text, p_stale interval, p_max_attempts bigint, p_look bigint, p_look_tenants text[], p_look_keys text[]) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_enqueue(p_kind text, p_payload jsonb, p_key text DEFAULT NULL::text, p_delay interval DEFAULT NULL::interval, p_tenant text DEFAULT NULL::text, p_event_id uuid DEFAULT NULL::uuid, p_notify boolean DEFAULT true) RETURNS uuid
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'on'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_enqueue(p_kind text, p_payload jsonb, p_key text, p_delay interval, p_tenant text, p_event_id uuid, p_notify boolean) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_enqueue_many(p_tenant text, p_events jsonb, p_notify boolean DEFAULT true) RETURNS uuid[]
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'on'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_enqueue_many(p_tenant text, p_events jsonb, p_notify boolean) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_health(p_tenant text, p_stale interval DEFAULT '00:05:00'::interval) RETURNS TABLE(parked bigint, parked_kinds text[], parked_for interval, claimed bigint, stale bigint, claimed_for interval, due_kinds text[], due_for interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_health(p_tenant text, p_stale interval) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_hold(p_tenant text, p_rows tid[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_hold(p_tenant text, p_rows tid[]) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_last(p_tenant text, p_key text) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_last(p_tenant text, p_key text) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_list(p_tenant text, p_state text DEFAULT NULL::text, p_kind text DEFAULT NULL::text, p_limit bigint DEFAULT 50, p_before uuid DEFAULT NULL::uuid, p_key text DEFAULT NULL::text, p_older interval DEFAULT NULL::interval, p_payload bigint DEFAULT 0) RETURNS TABLE(event_id uuid, kind text, key text, state text, attempts bigint, last_error text, claimed_by text, created_at timestamp with time zone, available_at timestamp with time zone, claimed_at timestamp with time zone, parked_at timestamp with time zone, payload text, payload_bytes bigint)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_list(p_tenant text, p_state text, p_kind text, p_limit bigint, p_before uuid, p_key text, p_older interval, p_payload bigint) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_matching(p_tenant text, p_state text, p_kind text, p_key text, p_until timestamp with time zone, p_before uuid, p_limit bigint) RETURNS TABLE(event_id uuid)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_matching(p_tenant text, p_state text, p_kind text, p_key text, p_until timestamp with time zone, p_before uuid, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_new_id(p_at timestamp with time zone) RETURNS uuid
    LANGUAGE plpgsql
    AS $$ … $$;
ALTER FUNCTION relay.outbox_new_id(p_at timestamp with time zone) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_open(p_tenant text, p_rows tid[]) RETURNS TABLE(kind text)
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_open(p_tenant text, p_rows tid[]) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_park(p_tenant text, p_event_ids uuid[], p_reason text) RETURNS TABLE(n bigint, outcome text, was text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_park(p_tenant text, p_event_ids uuid[], p_reason text) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_promote(p_tenant text, p_keys text[]) RETURNS TABLE(kind text)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_promote(p_tenant text, p_keys text[]) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_purge(p_tenant text, p_older interval, p_limit bigint, p_kind text DEFAULT NULL::text, p_key text DEFAULT NULL::text) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_purge(p_tenant text, p_older interval, p_limit bigint, p_kind text, p_key text) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_restart(p_tenant text, p_at timestamp with time zone, p_rows tid[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_restart(p_tenant text, p_at timestamp with time zone, p_rows tid[]) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_retry(p_tenant text, p_event_ids uuid[]) RETURNS TABLE(n bigint, outcome text, was text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_retry(p_tenant text, p_event_ids uuid[]) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_retry_parked(p_tenant text, p_older interval, p_limit bigint, p_kind text DEFAULT NULL::text, p_key text DEFAULT NULL::text) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_retry_parked(p_tenant text, p_older interval, p_limit bigint, p_kind text, p_key text) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_ring(p_tenant text) RETURNS void
    LANGUAGE plpgsql
    SET trace_notify TO 'off'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_ring(p_tenant text) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_settle(p_claimed_by text, p_tenants text[], p_counts bigint[], p_event_ids uuid[], p_fences bigint[], p_outcomes text[], p_errors text[], p_delays interval[], p_max_attempts bigint) RETURNS TABLE(outcome text, state text, ns bigint[], tenant_id text, kind text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_settle(p_claimed_by text, p_tenants text[], p_counts bigint[], p_event_ids uuid[], p_fences bigint[], p_outcomes text[], p_errors text[], p_delays interval[], p_max_attempts bigint) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_show(p_tenant text, p_event_id uuid) RETURNS TABLE(event_id uuid, kind text, key text, state text, payload text, attempts bigint, last_error text, suspect boolean, fence bigint, claimed_by text, created_at timestamp with time zone, available_at timestamp with time zone, first_claimed_at timestamp with time zone, claimed_at timestamp with time zone, parked_at timestamp with time zone)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_show(p_tenant text, p_event_id uuid) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_status(p_tenant text, p_stale interval DEFAULT '00:05:00'::interval) RETURNS TABLE(kind text, due bigint, later bigint, waiting bigint, claimed bigint, parked bigint, oldest interval, age interval, attempts bigint, stale bigint, claimed_for interval, parked_for interval)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_status(p_tenant text, p_stale interval) OWNER TO relay_api;

CREATE FUNCTION relay.outbox_tenants(p_as text[] DEFAULT '{gateway,operator}'::text[]) RETURNS TABLE(tenant_id text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_tenants(p_as text[]) OWNER TO relay_sweep;

CREATE FUNCTION relay.outbox_unclaim(p_tenants text[], p_claimed_by text) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.outbox_unclaim(p_tenants text[], p_claimed_by text) OWNER TO relay_api;

CREATE FUNCTION relay.pace(p_tenant text, p_relay text) RETURNS interval
    LANGUAGE plpgsql
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.pace(p_tenant text, p_relay text) OWNER TO relay_api;

CREATE FUNCTION relay.pending_upto(p_tenant text, p_relay text, p_limit bigint) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.pending_upto(p_tenant text, p_relay text, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.poll(p_tenant text, p_job_ids uuid[], p_batch_limit bigint DEFAULT 4194304) RETURNS TABLE(n bigint, job_id uuid, status text, attempt bigint, response_status bigint, response_headers text, response_body bytea, error_code text, error_message text, created_at timestamp with time zone, claimed_at timestamp with time zone, completed_at timestamp with time zone, expires_at timestamp with time zone, remaining interval, fits boolean)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.poll(p_tenant text, p_job_ids uuid[], p_batch_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.promote_due(p_tenant text, p_relay text, p_limit bigint) RETURNS interval
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.promote_due(p_tenant text, p_relay text, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.purge(p_tenant text, p_keep interval, p_limit bigint) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.purge(p_tenant text, p_keep interval, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.ready_jobs(p_tenant text, p_rows tid[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.ready_jobs(p_tenant text, p_rows tid[]) OWNER TO relay_api;

CREATE FUNCTION relay.reclaim(p_relay text, p_tenants text[], p_limit bigint, p_lease interval) RETURNS TABLE(tenant_id text, relay_id text, job_id uuid, status text)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.reclaim(p_relay text, p_tenants text[], p_limit bigint, p_lease interval) OWNER TO relay_api;

CREATE FUNCTION relay.reclaim_lost(p_tenant text, p_relay text, p_limit bigint) RETURNS TABLE(tenant_id text, relay_id text, job_id uuid, status text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.reclaim_lost(p_tenant text, p_relay text, p_limit bigint) OWNER TO relay_api;

CREATE FUNCTION relay.release(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_started boolean[]) RETURNS TABLE(n bigint, outcome text, status text)
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.release(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_started boolean[]) OWNER TO relay_api;

CREATE FUNCTION relay.renew_jobs(p_tenant text, p_rows tid[], p_until timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.renew_jobs(p_tenant text, p_rows tid[], p_until timestamp with time zone) OWNER TO relay_api;

CREATE FUNCTION relay.request_digest(p_relay text, p_operation text, p_headers jsonb, p_body bytea, p_max_attempts bigint) RETURNS bytea
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.request_digest(p_relay text, p_operation text, p_headers jsonb, p_body bytea, p_max_attempts bigint) OWNER TO relay_api;

CREATE FUNCTION relay.retry(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_delays interval[], p_give_backs boolean[], p_error_codes text[], p_error_messages text[]) RETURNS TABLE(n bigint, outcome text, status text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$ … $$;
ALTER FUNCTION relay.retry(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_delays interval[], p_give_backs boolean[], p_error_codes text[], p_error_messages text[]) OWNER TO relay_api;

CREATE FUNCTION relay.retry_after(p_pace interval, p_max_pending bigint) RETURNS interval
    LANGUAGE sql IMMUTABLE
    AS $$ … $$;
ALTER FUNCTION relay.retry_after(p_pace interval, p_max_pending bigint) OWNER TO relay_api;

CREATE FUNCTION relay.return_jobs(p_tenant text, p_at timestamp with time zone, p_ns bigint[], p_rows tid[], p_give_backs boolean[], p_delays interval[], p_error_codes text[], p_error_messages text[]) RETURNS TABLE(n bigint, job_id uuid, relay_id text, status text)
    LANGUAGE plpgsql
    SET enable_indexscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'on'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.return_jobs(p_tenant text, p_at timestamp with time zone, p_ns bigint[], p_rows tid[], p_give_backs boolean[], p_delays interval[], p_error_codes text[], p_error_messages text[]) OWNER TO relay_api;

CREATE FUNCTION relay.revoke_binding(p_login text, p_kind text, p_tenant text, p_relay text) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.revoke_binding(p_login text, p_kind text, p_tenant text, p_relay text) OWNER TO relay_api;

CREATE FUNCTION relay.ring(p_kinds text[], p_tenants text[], p_relays text[], p_payloads text[]) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET trace_notify TO 'off'
    AS $$ … $$;
ALTER FUNCTION relay.ring(p_kinds text[], p_tenants text[], p_relays text[], p_payloads text[]) OWNER TO relay_api;

CREATE FUNCTION relay.row_tenant() RETURNS text
    LANGUAGE sql STABLE
    RETURN CASE WHEN ((CURRENT_USER = 'relay_api'::name) AND (current_setting('app.tenant_id'::text, true) <> ''::text)) THEN current_setting('app.tenant_id'::text, true) ELSE relay.bound_tenant() END;
ALTER FUNCTION relay.row_tenant() OWNER TO relay_owner;

CREATE FUNCTION relay.run_sweeps(p_relay text, p_limit bigint, p_lease interval, p_keep interval, p_every interval[]) RETURNS TABLE(sweep text, tenant_id text, relay_id text, job_id uuid, status text)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.run_sweeps(p_relay text, p_limit bigint, p_lease interval, p_keep interval, p_every interval[]) OWNER TO relay_api;

CREATE FUNCTION relay.session_age() RETURNS interval
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.session_age() OWNER TO relay_api;

CREATE FUNCTION relay.set_tenant(p_tenant text) RETURNS text
    LANGUAGE plpgsql
    AS $$ … $$;
ALTER FUNCTION relay.set_tenant(p_tenant text) OWNER TO relay_api;

CREATE FUNCTION relay.sweep_again(p_name text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ … $$;
ALTER FUNCTION relay.sweep_again(p_name text) OWNER TO relay_api;

CREATE FUNCTION relay.sweep_turn(p_name text, p_every interval) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.sweep_turn(p_name text, p_every interval) OWNER TO relay_api;

CREATE FUNCTION relay.tenants_due(p_name text, p_relay text, p_keep interval) RETURNS TABLE(tenant_id text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_indexscan TO 'on'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET "TimeZone" TO 'UTC'
    AS $$ … $$;
ALTER FUNCTION relay.tenants_due(p_name text, p_relay text, p_keep interval) OWNER TO relay_sweep;

CREATE FUNCTION relay.unbind_tenant(p_before text) RETURNS void
    LANGUAGE plpgsql
    AS $$ … $$;
ALTER FUNCTION relay.unbind_tenant(p_before text) OWNER TO relay_api;

CREATE TABLE relay.durable_chunk (
    tenant_id text NOT NULL COLLATE pg_catalog."C",
    job_id uuid NOT NULL,
    seq bigint NOT NULL,
    payload jsonb NOT NULL,
    status text NOT NULL COLLATE pg_catalog."C",
    attempts bigint DEFAULT 0 NOT NULL,
    lease_version bigint DEFAULT 0 NOT NULL,
    lease_token uuid,
    lease_expires_at timestamp with time zone,
    claimed_by text COLLATE pg_catalog."C",
    claimed_at timestamp with time zone,
    available_at timestamp with time zone,
    checkpoint jsonb,
    outcome jsonb,
    rows_total bigint DEFAULT 0 NOT NULL,
    rows_done bigint DEFAULT 0 NOT NULL,
    rows_saved bigint DEFAULT 0 NOT NULL,
    rows_failed bigint DEFAULT 0 NOT NULL,
    last_error text,
    created_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone,
    CONSTRAINT durable_chunk_states CHECK (((seq >= 1) AND
CASE
    WHEN (lease_expires_at IS NOT NULL) THEN ((status = 'running'::text) AND (lease_token IS NOT NULL) AND (claimed_by IS NOT NULL) AND (available_at IS NULL) AND (ended_at IS NULL))
    WHEN (ended_at IS NOT NULL) THEN ((available_at IS NULL) AND ((status = 'done'::text) OR ((status = ANY (ARRAY['failed'::text, 'cancelled'::text])) AND (lease_token IS NULL))))
    WHEN (available_at IS NOT NULL) THEN ((status = 'retry'::text) AND (lease_token IS NULL))
    ELSE ((status = ANY (ARRAY['pending'::text, 'retry'::text, 'needs_review'::text])) AND (lease_token IS NULL))
END))
)
WITH (fillfactor='50', vacuum_truncate=off, autovacuum_vacuum_threshold='5000', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_threshold='2147483647', autovacuum_analyze_scale_factor='0');
ALTER TABLE ONLY relay.durable_chunk ALTER COLUMN checkpoint SET STORAGE EXTERNAL;
ALTER TABLE ONLY relay.durable_chunk FORCE ROW LEVEL SECURITY;
ALTER TABLE relay.durable_chunk OWNER TO relay_owner;

CREATE TABLE relay.durable_event (
    tenant_id text NOT NULL COLLATE pg_catalog."C",
    job_id uuid NOT NULL,
    xid xid8 NOT NULL,
    n bigint NOT NULL,
    at timestamp with time zone NOT NULL,
    seq bigint,
    type text NOT NULL COLLATE pg_catalog."C",
    actor text,
    channel text,
    holder text,
    detail jsonb
);
ALTER TABLE ONLY relay.durable_event FORCE ROW LEVEL SECURITY;
ALTER TABLE relay.durable_event OWNER TO relay_owner;

CREATE TABLE relay.durable_job (
    tenant_id text NOT NULL COLLATE pg_catalog."C",
    job_id uuid NOT NULL,
    kind text NOT NULL COLLATE pg_catalog."C",
    params jsonb NOT NULL,
    idempotent boolean NOT NULL,
    max_attempts bigint NOT NULL,
    priority bigint DEFAULT 0 NOT NULL,
    rank bigint NOT NULL,
    job_seq bigint NOT NULL,
    status text NOT NULL COLLATE pg_catalog."C",
    rows_total bigint DEFAULT 0 NOT NULL,
    rows_done bigint DEFAULT 0 NOT NULL,
    rows_failed bigint DEFAULT 0 NOT NULL,
    chunks_total bigint DEFAULT 0 NOT NULL,
    chunks_pending bigint DEFAULT 0 NOT NULL,
    chunks_running bigint DEFAULT 0 NOT NULL,
    chunks_retry bigint DEFAULT 0 NOT NULL,
    chunks_done bigint DEFAULT 0 NOT NULL,
    chunks_failed bigint DEFAULT 0 NOT NULL,
    chunks_needs_review bigint DEFAULT 0 NOT NULL,
    chunks_cancelled bigint DEFAULT 0 NOT NULL,
    counted_at timestamp with time zone NOT NULL,
    last_error text,
    created_by text,
    created_at timestamp with time zone NOT NULL,
    started_at timestamp with time zone,
    ended_at timestamp with time zone,
    updated_at timestamp with time zone NOT NULL,
    CONSTRAINT durable_job_check CHECK ((rank = (- priority))),
    CONSTRAINT durable_job_check1 CHECK (((status = ANY (ARRAY['completed'::text, 'completed_with_errors'::text, 'failed'::text, 'cancelled'::text, 'removing'::text])) = (ended_at IS NOT NULL))),
    CONSTRAINT durable_job_kind_check CHECK (((kind <> ''::text) AND (octet_length(kind) <= 200))),
    CONSTRAINT durable_job_max_attempts_check CHECK ((max_attempts >= 1)),
    CONSTRAINT durable_job_status_check CHECK ((status = ANY (ARRAY['submitting'::text, 'queued'::text, 'running'::text, 'paused'::text, 'needs_review'::text, 'completed'::text, 'completed_with_errors'::text, 'failed'::text, 'cancelled'::text, 'removing'::text]))),
    CONSTRAINT durable_job_tenant_id_check CHECK (((tenant_id <> ''::text) AND (octet_length(tenant_id) <= 200)))
)
WITH (fillfactor='60', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_threshold='2147483647', autovacuum_analyze_scale_factor='0');
ALTER TABLE ONLY relay.durable_job FORCE ROW LEVEL SECURITY;
ALTER TABLE relay.durable_job OWNER TO relay_owner;

CREATE TABLE relay.durable_row_error (
    tenant_id text NOT NULL COLLATE pg_catalog."C",
    job_id uuid NOT NULL,
    seq bigint NOT NULL,
    row_no bigint NOT NULL,
    code text NOT NULL COLLATE pg_catalog."C",
    message text NOT NULL,
    data jsonb,
    lease_version bigint NOT NULL,
    created_at timestamp with time zone NOT NULL,
    CONSTRAINT durable_row_error_code_check CHECK ((octet_length(code) <= 200))
);
ALTER TABLE ONLY relay.durable_row_error FORCE ROW LEVEL SECURITY;
ALTER TABLE relay.durable_row_error OWNER TO relay_owner;

CREATE TABLE relay.durable_turn (
    name text NOT NULL,
    role_oid oid NOT NULL,
    next_due_at timestamp with time zone NOT NULL
);
ALTER TABLE relay.durable_turn OWNER TO relay_owner;

CREATE TABLE relay.installation (
    only_row boolean DEFAULT true NOT NULL,
    secret bytea DEFAULT (uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())) NOT NULL,
    max_value_bytes bigint DEFAULT 8388608 NOT NULL,
    max_checkpoint_bytes bigint DEFAULT 1048576 NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT installation_max_checkpoint_bytes_check CHECK (((max_checkpoint_bytes >= 65536) AND (max_checkpoint_bytes <= 536870912))),
    CONSTRAINT installation_max_value_bytes_check CHECK (((max_value_bytes >= 65536) AND (max_value_bytes <= 536870912))),
    CONSTRAINT installation_only_row_check CHECK (only_row)
);
ALTER TABLE relay.installation OWNER TO relay_owner;

CREATE TABLE relay.outbox (
    tenant_id text NOT NULL COLLATE pg_catalog."C",
    event_id uuid NOT NULL,
    kind text NOT NULL COLLATE pg_catalog."C",
    key text COLLATE pg_catalog."C",
    payload jsonb NOT NULL,
    payload_bytes bigint NOT NULL,
    seq bigint NOT NULL,
    state text NOT NULL COLLATE pg_catalog."C",
    created_at timestamp with time zone NOT NULL,
    available_at timestamp with time zone NOT NULL,
    first_claimed_at timestamp with time zone,
    claimed_at timestamp with time zone,
    claimed_by text COLLATE pg_catalog."C",
    fence bigint DEFAULT 0 NOT NULL,
    attempts bigint DEFAULT 0 NOT NULL,
    last_error text,
    suspect boolean DEFAULT false NOT NULL,
    parked_at timestamp with time zone,
    CONSTRAINT outbox_check CHECK (((state = 'claimed'::text) = (claimed_by IS NOT NULL))),
    CONSTRAINT outbox_check1 CHECK (((claimed_by IS NULL) = (claimed_at IS NULL))),
    CONSTRAINT outbox_check2 CHECK (((state = 'parked'::text) = (parked_at IS NOT NULL))),
    CONSTRAINT outbox_check3 CHECK (((state <> 'waiting'::text) OR (key IS NOT NULL))),
    CONSTRAINT outbox_key_check CHECK (((key <> ''::text) AND (octet_length(key) <= 200))),
    CONSTRAINT outbox_kind_check CHECK (((kind <> ''::text) AND (octet_length(kind) <= 200))),
    CONSTRAINT outbox_state_check CHECK ((state = ANY (ARRAY['ready'::text, 'waiting'::text, 'claimed'::text, 'parked'::text]))),
    CONSTRAINT outbox_tenant_id_check CHECK (((tenant_id <> ''::text) AND (octet_length(tenant_id) <= 200)))
)
WITH (vacuum_truncate=off, autovacuum_vacuum_threshold='5000', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_insert_threshold='-1', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_threshold='2147483647', autovacuum_analyze_scale_factor='0');
ALTER TABLE ONLY relay.outbox ALTER COLUMN payload SET STORAGE EXTERNAL;
ALTER TABLE ONLY relay.outbox FORCE ROW LEVEL SECURITY;
ALTER TABLE relay.outbox OWNER TO relay_owner;

CREATE TABLE relay.role_binding (
    role_oid regrole NOT NULL,
    kind text NOT NULL,
    tenant_id text COLLATE pg_catalog."C",
    relay_id text COLLATE pg_catalog."C",
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT role_binding_check CHECK (((relay_id IS NULL) OR (kind = 'worker'::text))),
    CONSTRAINT role_binding_kind_check CHECK ((kind = ANY (ARRAY['gateway'::text, 'worker'::text, 'operator'::text]))),
    CONSTRAINT role_binding_relay_id_check CHECK (((relay_id <> ''::text) AND (octet_length(relay_id) <= 200))),
    CONSTRAINT role_binding_tenant_id_check CHECK (((tenant_id <> ''::text) AND (octet_length(tenant_id) <= 200)))
);
ALTER TABLE relay.role_binding OWNER TO relay_owner;

CREATE TABLE relay.s2r_relay_dispatch_queue (
    tenant_id text NOT NULL COLLATE pg_catalog."C",
    job_id uuid NOT NULL,
    relay_id text NOT NULL COLLATE pg_catalog."C",
    seq bigint NOT NULL,
    state text NOT NULL COLLATE pg_catalog."C",
    attempt bigint DEFAULT 0 NOT NULL,
    max_attempts bigint NOT NULL,
    fence bigint DEFAULT 0 NOT NULL,
    claimed_by text COLLATE pg_catalog."C",
    claim_id uuid,
    claimed_at timestamp with time zone,
    lease_expires_at timestamp with time zone,
    available_at timestamp with time zone,
    created_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    CONSTRAINT s2r_relay_dispatch_queue_check CHECK (((state = 'claimed'::text) = (claimed_by IS NOT NULL))),
    CONSTRAINT s2r_relay_dispatch_queue_check1 CHECK (((claimed_by IS NULL) = (lease_expires_at IS NULL))),
    CONSTRAINT s2r_relay_dispatch_queue_check2 CHECK (((state = 'delayed'::text) = (available_at IS NOT NULL))),
    CONSTRAINT s2r_relay_dispatch_queue_state_check CHECK ((state = ANY (ARRAY['ready'::text, 'delayed'::text, 'claimed'::text])))
)
WITH (fillfactor='60', vacuum_truncate=off, autovacuum_vacuum_threshold='5000', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_insert_threshold='-1', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_threshold='2147483647', autovacuum_analyze_scale_factor='0');
ALTER TABLE ONLY relay.s2r_relay_dispatch_queue FORCE ROW LEVEL SECURITY;
ALTER TABLE relay.s2r_relay_dispatch_queue OWNER TO relay_owner;

CREATE TABLE relay.s2r_relay_dispatch_request (
    tenant_id text NOT NULL COLLATE pg_catalog."C",
    job_id uuid NOT NULL,
    relay_id text NOT NULL COLLATE pg_catalog."C",
    operation text NOT NULL COLLATE pg_catalog."C",
    request_headers jsonb NOT NULL,
    request_body bytea NOT NULL,
    max_attempts bigint NOT NULL,
    created_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    CONSTRAINT s2r_relay_dispatch_request_max_attempts_check CHECK ((max_attempts >= 1)),
    CONSTRAINT s2r_relay_dispatch_request_operation_check CHECK (((operation <> ''::text) AND (octet_length(operation) <= 200))),
    CONSTRAINT s2r_relay_dispatch_request_relay_id_check CHECK (((relay_id <> ''::text) AND (octet_length(relay_id) <= 200))),
    CONSTRAINT s2r_relay_dispatch_request_tenant_id_check CHECK (((tenant_id <> ''::text) AND (octet_length(tenant_id) <= 200)))
);
ALTER TABLE ONLY relay.s2r_relay_dispatch_request FORCE ROW LEVEL SECURITY;
ALTER TABLE relay.s2r_relay_dispatch_request OWNER TO relay_owner;

CREATE TABLE relay.s2r_relay_dispatch_result (
    tenant_id text NOT NULL COLLATE pg_catalog."C",
    job_id uuid NOT NULL,
    relay_id text NOT NULL COLLATE pg_catalog."C",
    status text NOT NULL COLLATE pg_catalog."C",
    attempt bigint NOT NULL,
    fence bigint NOT NULL,
    claimed_by text COLLATE pg_catalog."C",
    response_status bigint,
    response_headers jsonb,
    response_body bytea,
    error_code text,
    error_message text,
    created_at timestamp with time zone NOT NULL,
    claimed_at timestamp with time zone,
    completed_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    CONSTRAINT s2r_relay_dispatch_result_status_check CHECK ((status = ANY (ARRAY['succeeded'::text, 'failed'::text, 'expired'::text])))
);
ALTER TABLE ONLY relay.s2r_relay_dispatch_result FORCE ROW LEVEL SECURITY;
ALTER TABLE relay.s2r_relay_dispatch_result OWNER TO relay_owner;

CREATE VIEW relay.s2r_relay_dispatch WITH (security_barrier='true') AS
 SELECT r.tenant_id,
    r.job_id,
    r.relay_id,
    r.operation,
    r.request_headers,
    r.request_body,
    r.max_attempts,
        CASE
            WHEN (d.job_id IS NOT NULL) THEN d.status
            WHEN (q.expires_at <= clock_timestamp()) THEN 'expired'::text
            WHEN (q.state = 'claimed'::text) THEN 'claimed'::text
            WHEN (q.job_id IS NOT NULL) THEN 'pending'::text
            ELSE NULL::text
        END AS status,
    COALESCE(d.attempt, q.attempt) AS attempt,
    COALESCE(d.fence, q.fence) AS fence,
    COALESCE(d.claimed_by, q.claimed_by) AS claimed_by,
    q.lease_expires_at,
    q.available_at,
    d.response_status,
    d.response_headers,
    d.response_body,
    d.error_code,
    d.error_message,
    r.created_at,
    COALESCE(d.claimed_at, q.claimed_at) AS claimed_at,
    d.completed_at,
    r.expires_at
   FROM ((relay.s2r_relay_dispatch_request r
     LEFT JOIN relay.s2r_relay_dispatch_queue q ON (((q.tenant_id = r.tenant_id) AND (q.job_id = r.job_id))))
     LEFT JOIN relay.s2r_relay_dispatch_result d ON (((d.tenant_id = r.tenant_id) AND (d.job_id = r.job_id))))
  WHERE (r.tenant_id = ( SELECT relay.bound_tenant() AS bound_tenant));
ALTER VIEW relay.s2r_relay_dispatch OWNER TO relay_owner;

CREATE TABLE relay.s2r_relay_dispatch_key (
    tenant_id text NOT NULL COLLATE pg_catalog."C",
    idempotency_key text NOT NULL COLLATE pg_catalog."C",
    request_digest bytea NOT NULL,
    job_id uuid NOT NULL,
    created_at timestamp with time zone NOT NULL,
    CONSTRAINT s2r_relay_dispatch_key_idempotency_key_check CHECK (((idempotency_key <> ''::text) AND (octet_length(idempotency_key) <= 200)))
);
ALTER TABLE ONLY relay.s2r_relay_dispatch_key FORCE ROW LEVEL SECURITY;
ALTER TABLE relay.s2r_relay_dispatch_key OWNER TO relay_owner;

CREATE TABLE relay.schema_history (
    step text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL,
    sha256 text NOT NULL,
    protocol bigint,
    compatible_from bigint,
    applied_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    applied_by text DEFAULT SESSION_USER NOT NULL,
    applied_with text NOT NULL,
    duration_ms bigint NOT NULL,
    CONSTRAINT schema_history_kind_check CHECK ((kind = ANY (ARRAY['table'::text, 'functions'::text])))
);
ALTER TABLE relay.schema_history OWNER TO relay_owner;

CREATE TABLE relay.sweep (
    name text NOT NULL,
    role_oid oid NOT NULL,
    next_due_at timestamp with time zone NOT NULL
);
ALTER TABLE relay.sweep OWNER TO relay_owner;

ALTER TABLE ONLY relay.durable_chunk
    ADD CONSTRAINT durable_chunk_pkey PRIMARY KEY (tenant_id, job_id, seq);

ALTER TABLE ONLY relay.durable_event
    ADD CONSTRAINT durable_event_pkey PRIMARY KEY (tenant_id, job_id, xid, n);

ALTER TABLE ONLY relay.durable_job
    ADD CONSTRAINT durable_job_pkey PRIMARY KEY (tenant_id, job_id);

ALTER TABLE ONLY relay.durable_row_error
    ADD CONSTRAINT durable_row_error_pkey PRIMARY KEY (tenant_id, job_id, seq, row_no, code);

ALTER TABLE ONLY relay.durable_turn
    ADD CONSTRAINT durable_turn_pkey PRIMARY KEY (name, role_oid);

ALTER TABLE ONLY relay.installation
    ADD CONSTRAINT installation_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY relay.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (tenant_id, event_id);

ALTER TABLE ONLY relay.role_binding
    ADD CONSTRAINT role_binding_role_oid_kind_tenant_id_relay_id_key UNIQUE NULLS NOT DISTINCT (role_oid, kind, tenant_id, relay_id);

ALTER TABLE ONLY relay.s2r_relay_dispatch_key
    ADD CONSTRAINT s2r_relay_dispatch_key_pkey PRIMARY KEY (tenant_id, idempotency_key);

ALTER TABLE ONLY relay.s2r_relay_dispatch_queue
    ADD CONSTRAINT s2r_relay_dispatch_queue_pkey PRIMARY KEY (tenant_id, job_id);

ALTER TABLE ONLY relay.s2r_relay_dispatch_request
    ADD CONSTRAINT s2r_relay_dispatch_request_pkey PRIMARY KEY (tenant_id, job_id);

ALTER TABLE ONLY relay.s2r_relay_dispatch_result
    ADD CONSTRAINT s2r_relay_dispatch_result_pkey PRIMARY KEY (tenant_id, job_id);

ALTER TABLE ONLY relay.schema_history
    ADD CONSTRAINT schema_history_pkey PRIMARY KEY (step);

ALTER TABLE ONLY relay.sweep
    ADD CONSTRAINT sweep_pkey PRIMARY KEY (name, role_oid);

CREATE INDEX durable_chunk_due ON relay.durable_chunk USING btree (tenant_id, available_at) WHERE (available_at IS NOT NULL);

CREATE INDEX durable_chunk_open ON relay.durable_chunk USING btree (tenant_id, job_id, seq) WHERE ((status = ANY (ARRAY['pending'::text, 'retry'::text])) AND (available_at IS NULL));

CREATE INDEX durable_chunk_running ON relay.durable_chunk USING btree (tenant_id, job_id, seq) WHERE (status = 'running'::text);

CREATE INDEX durable_chunk_waiting ON relay.durable_chunk USING btree (tenant_id, job_id, seq) WHERE (available_at IS NOT NULL);

CREATE INDEX durable_job_aside ON relay.durable_job USING btree (tenant_id, status, updated_at) WHERE (status = ANY (ARRAY['submitting'::text, 'paused'::text, 'removing'::text]));

CREATE INDEX durable_job_ended ON relay.durable_job USING btree (tenant_id, ended_at) WHERE (status = ANY (ARRAY['completed'::text, 'completed_with_errors'::text, 'failed'::text, 'cancelled'::text]));

CREATE INDEX durable_job_open ON relay.durable_job USING btree (tenant_id, kind, rank, job_seq, job_id) WHERE (status = ANY (ARRAY['queued'::text, 'running'::text]));

CREATE INDEX outbox_claimed ON relay.outbox USING btree (tenant_id, claimed_at) WHERE (state = 'claimed'::text);

CREATE INDEX outbox_key ON relay.outbox USING btree (tenant_id, key, seq, event_id) WHERE ((key IS NOT NULL) AND (parked_at IS NULL));

CREATE INDEX outbox_parked ON relay.outbox USING btree (tenant_id, parked_at) WHERE (state = 'parked'::text);

CREATE INDEX outbox_ready ON relay.outbox USING btree (tenant_id, kind, available_at, seq, event_id) WHERE (state = 'ready'::text);

CREATE INDEX outbox_turn ON relay.outbox USING btree (tenant_id, key, seq, event_id) WHERE ((state = ANY (ARRAY['ready'::text, 'claimed'::text])) AND (key IS NOT NULL));

CREATE INDEX outbox_waiting ON relay.outbox USING btree (tenant_id, key) WHERE (state = 'waiting'::text);

CREATE INDEX s2r_relay_dispatch_key_job ON relay.s2r_relay_dispatch_key USING btree (tenant_id, job_id, created_at) WHERE (created_at > '-infinity'::timestamp with time zone);

CREATE INDEX s2r_relay_dispatch_queue_claimed ON relay.s2r_relay_dispatch_queue USING btree (tenant_id, relay_id, claimed_at) WHERE (state = 'claimed'::text);

CREATE INDEX s2r_relay_dispatch_queue_delayed ON relay.s2r_relay_dispatch_queue USING btree (tenant_id, relay_id, available_at) WHERE (state = 'delayed'::text);

CREATE INDEX s2r_relay_dispatch_queue_expiry ON relay.s2r_relay_dispatch_queue USING btree (tenant_id, expires_at) WHERE (claimed_by IS NULL);

CREATE INDEX s2r_relay_dispatch_queue_ready ON relay.s2r_relay_dispatch_queue USING btree (tenant_id, relay_id, seq, job_id) WHERE (state = 'ready'::text);

CREATE INDEX s2r_relay_dispatch_result_retention ON relay.s2r_relay_dispatch_result USING btree (tenant_id, completed_at) WHERE (completed_at > '-infinity'::timestamp with time zone);

CREATE POLICY by_tenant ON relay.durable_chunk USING ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant))) WITH CHECK ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant)));

CREATE POLICY by_tenant ON relay.durable_event USING ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant))) WITH CHECK ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant)));

CREATE POLICY by_tenant ON relay.durable_job USING ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant))) WITH CHECK ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant)));

CREATE POLICY by_tenant ON relay.durable_row_error USING ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant))) WITH CHECK ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant)));

CREATE POLICY by_tenant ON relay.outbox USING ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant))) WITH CHECK ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant)));

CREATE POLICY by_tenant ON relay.s2r_relay_dispatch_key USING ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant))) WITH CHECK ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant)));

CREATE POLICY by_tenant ON relay.s2r_relay_dispatch_queue USING ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant))) WITH CHECK ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant)));

CREATE POLICY by_tenant ON relay.s2r_relay_dispatch_request USING ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant))) WITH CHECK ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant)));

CREATE POLICY by_tenant ON relay.s2r_relay_dispatch_result USING ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant))) WITH CHECK ((tenant_id = ( SELECT relay.row_tenant() AS row_tenant)));

CREATE POLICY due_work ON relay.durable_chunk FOR SELECT TO relay_sweep USING (true);

CREATE POLICY due_work ON relay.durable_job FOR SELECT TO relay_sweep USING (true);

CREATE POLICY due_work ON relay.outbox FOR SELECT TO relay_sweep USING (true);

CREATE POLICY due_work ON relay.s2r_relay_dispatch_queue FOR SELECT TO relay_sweep USING (true);

CREATE POLICY due_work ON relay.s2r_relay_dispatch_result FOR SELECT TO relay_sweep USING (true);

ALTER TABLE relay.durable_chunk ENABLE ROW LEVEL SECURITY;

ALTER TABLE relay.durable_event ENABLE ROW LEVEL SECURITY;

ALTER TABLE relay.durable_job ENABLE ROW LEVEL SECURITY;

ALTER TABLE relay.durable_row_error ENABLE ROW LEVEL SECURITY;

ALTER TABLE relay.outbox ENABLE ROW LEVEL SECURITY;

ALTER TABLE relay.s2r_relay_dispatch_key ENABLE ROW LEVEL SECURITY;

ALTER TABLE relay.s2r_relay_dispatch_queue ENABLE ROW LEVEL SECURITY;

ALTER TABLE relay.s2r_relay_dispatch_request ENABLE ROW LEVEL SECURITY;

ALTER TABLE relay.s2r_relay_dispatch_result ENABLE ROW LEVEL SECURITY;

GRANT USAGE ON SCHEMA relay TO relay_api;
GRANT USAGE ON SCHEMA relay TO relay_sweep;
GRANT USAGE ON SCHEMA relay TO relay_gateway;
GRANT USAGE ON SCHEMA relay TO relay_worker;
GRANT USAGE ON SCHEMA relay TO relay_operator;

REVOKE ALL ON FUNCTION relay.backlog(p_tenant text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.backlog(p_tenant text) TO relay_gateway;
GRANT ALL ON FUNCTION relay.backlog(p_tenant text) TO relay_operator;

REVOKE ALL ON FUNCTION relay.bind_tenant(p_tenant text, p_relay text, p_kinds text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.channel(p_kind text, p_tenant text, p_relay text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.channel(p_kind text, p_tenant text, p_relay text) TO relay_gateway;
GRANT ALL ON FUNCTION relay.channel(p_kind text, p_tenant text, p_relay text) TO relay_worker;
GRANT ALL ON FUNCTION relay.channel(p_kind text, p_tenant text, p_relay text) TO relay_operator;

REVOKE ALL ON FUNCTION relay.channel_name(p_kind text, p_tenant text, p_relay text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.check_json(p_what text, p_json jsonb, p_most text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.check_parts(p_headers text[], p_bodies bytea[], p_codes text[], p_messages text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.check_size(p_what text, p_bytes bigint, p_most text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.claim(p_relay text, p_tenants text[], p_limit bigint, p_claimed_by text, p_claim_id uuid, p_lease interval, p_after bigint[], p_start bigint, p_body_limit bigint, p_batch_limit bigint, p_sweep interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.claim(p_relay text, p_tenants text[], p_limit bigint, p_claimed_by text, p_claim_id uuid, p_lease interval, p_after bigint[], p_start bigint, p_body_limit bigint, p_batch_limit bigint, p_sweep interval) TO relay_worker;

REVOKE ALL ON FUNCTION relay.claim_again(p_relay text, p_tenants text[], p_claimed_by text, p_claim_id uuid, p_body_limit bigint, p_batch_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.claim_again(p_relay text, p_tenants text[], p_claimed_by text, p_claim_id uuid, p_body_limit bigint, p_batch_limit bigint) TO relay_worker;

REVOKE ALL ON FUNCTION relay.claim_turn(p_tenant text, p_relay text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.complete(p_relay text, p_claimed_by text, p_tenants text[], p_counts bigint[], p_job_ids uuid[], p_fences bigint[], p_statuses text[], p_response_statuses bigint[], p_response_headers text[], p_response_bodies bytea[], p_error_codes text[], p_error_messages text[], p_notify boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.complete(p_relay text, p_claimed_by text, p_tenants text[], p_counts bigint[], p_job_ids uuid[], p_fences bigint[], p_statuses text[], p_response_statuses bigint[], p_response_headers text[], p_response_bodies bytea[], p_error_codes text[], p_error_messages text[], p_notify boolean) TO relay_worker;

REVOKE ALL ON FUNCTION relay.confirm_commit() FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.drop_jobs(p_tenant text, p_results tid[], p_requests tid[], p_keys tid[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_abandon(p_tenant text, p_job_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_abandon(p_tenant text, p_job_id uuid) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.durable_all_tenants() FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_all_tenants() TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_all_tenants() TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_candidates(p_tenant text, p_kinds text[], p_limit bigint, p_job_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_candidates(p_tenant text, p_kinds text[], p_limit bigint, p_job_id uuid) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_check_event(p_actor text, p_channel text, p_holder text, p_detail jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_check_extra(p_extra jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_checkpoint(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_checkpoint jsonb, p_rows_done bigint, p_rows_failed bigint, p_lease interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_checkpoint(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_checkpoint jsonb, p_rows_done bigint, p_rows_failed bigint, p_lease interval) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_chunks(p_tenant text, p_job_id uuid, p_seqs bigint[], p_after bigint, p_limit bigint, p_status text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_chunks(p_tenant text, p_job_id uuid, p_seqs bigint[], p_after bigint, p_limit bigint, p_status text) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_chunks(p_tenant text, p_job_id uuid, p_seqs bigint[], p_after bigint, p_limit bigint, p_status text) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_claim(p_tenants text[], p_kinds text[], p_limits bigint[], p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval, p_start bigint, p_after jsonb, p_job_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_claim(p_tenants text[], p_kinds text[], p_limits bigint[], p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval, p_start bigint, p_after jsonb, p_job_id uuid) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_claim_again(p_tenants text[], p_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_claim_again(p_tenants text[], p_token uuid) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_claim_chunk(p_tenant text, p_job_id uuid, p_seq bigint, p_lease_version bigint, p_claimed_by text, p_token uuid, p_lease interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_claim_chunk(p_tenant text, p_job_id uuid, p_seq bigint, p_lease_version bigint, p_claimed_by text, p_token uuid, p_lease interval) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_claim_next(p_tenant text, p_job_id uuid, p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_claim_next(p_tenant text, p_job_id uuid, p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_complete(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_outcome jsonb, p_rows_done bigint, p_rows_failed bigint, OUT outcome text, OUT last boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_complete(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_outcome jsonb, p_rows_done bigint, p_rows_failed bigint, OUT outcome text, OUT last boolean) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_complete_all(p_tenant text, p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[], p_rows_done bigint[], p_rows_failed bigint[], OUT ns bigint[], OUT lasts boolean[], OUT rest bigint[], OUT rest_outcomes text[], OUT rest_lasts boolean[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_complete_many(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[], p_rows_done bigint[], p_rows_failed bigint[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_complete_many(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[], p_rows_done bigint[], p_rows_failed bigint[]) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_complete_one(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_outcome jsonb, p_rows_done bigint, p_rows_failed bigint, OUT outcome text, OUT last boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_conclude(p_tenant text, p_job_id uuid, p_actor text, p_channel text, p_empty boolean, p_count boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_control(p_tenant text, p_job_id uuid, p_action text, p_actor text, p_channel text, p_note text, p_after bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_control(p_tenant text, p_job_id uuid, p_action text, p_actor text, p_channel text, p_note text, p_after bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_control(p_tenant text, p_job_id uuid, p_action text, p_actor text, p_channel text, p_note text, p_after bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_count(p_tenant text, p_job_id uuid) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_done(p_tenant text, p_at timestamp with time zone, p_rows tid[], p_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[], p_rows_done bigint[], p_rows_failed bigint[], p_jobs uuid[], p_lasts boolean[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_drop(p_tenant text, p_chunks tid[], p_errors tid[], p_events tid[], p_jobs tid[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_events(p_tenant text, p_job_id uuid, p_after text, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_events(p_tenant text, p_job_id uuid, p_after text, p_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_events(p_tenant text, p_job_id uuid, p_after text, p_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_fail(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_message text, p_retryable boolean, p_delay interval, OUT status text, OUT last boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_fail(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_message text, p_retryable boolean, p_delay interval, OUT status text, OUT last boolean) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_finish(p_tenant text, p_job_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_finish(p_tenant text, p_job_ids uuid[]) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_finish(p_tenant text, p_job_ids uuid[]) TO relay_worker;
GRANT ALL ON FUNCTION relay.durable_finish(p_tenant text, p_job_ids uuid[]) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_finish_lost(p_tenant text, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_finish_lost(p_tenant text, p_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_finish_lost(p_tenant text, p_limit bigint) TO relay_worker;
GRANT ALL ON FUNCTION relay.durable_finish_lost(p_tenant text, p_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_has_open(p_tenant text, p_job_id uuid) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_health(p_tenant text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_health(p_tenant text) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_health(p_tenant text) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_heartbeat(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_lease interval, p_rows_done bigint[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_heartbeat(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_lease interval, p_rows_done bigint[]) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_hold(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, OUT row_id tid, OUT at timestamp with time zone, OUT attempts bigint, OUT holder text, OUT most bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_insert_chunks(p_tenant text, p_job_id uuid, p_chunks jsonb, p_from bigint, p_notify boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_insert_chunks(p_tenant text, p_job_id uuid, p_chunks jsonb, p_from bigint, p_notify boolean) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.durable_insert_job(p_tenant text, p_job_id uuid, p_kind text, p_params jsonb, p_idempotent boolean, p_max_attempts bigint, p_priority bigint, p_created_by text, p_submitting boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_insert_job(p_tenant text, p_job_id uuid, p_kind text, p_params jsonb, p_idempotent boolean, p_max_attempts bigint, p_priority bigint, p_created_by text, p_submitting boolean) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.durable_is_last(p_tenant text, p_job_id uuid) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_jobs(p_tenant text, p_job_ids uuid[], p_fresh boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_jobs(p_tenant text, p_job_ids uuid[], p_fresh boolean) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_jobs(p_tenant text, p_job_ids uuid[], p_fresh boolean) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_matches(p_value jsonb, p_kind text, p_op text, p_wanted jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_may(p_from text, p_to text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_meets(p_row jsonb, p_filter jsonb, p_kinds jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_move(p_tenant text, p_at timestamp with time zone, p_rows tid[], p_status text, p_attempts text, p_available_at timestamp with time zone, p_error text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_promote(p_tenant text, p_limit bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_query(p_tenant text, p_table text, p_filter jsonb, p_job_id uuid, p_after jsonb, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_query(p_tenant text, p_table text, p_filter jsonb, p_job_id uuid, p_after jsonb, p_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_query(p_tenant text, p_table text, p_filter jsonb, p_job_id uuid, p_after jsonb, p_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_reap(p_tenant text, p_reaper text, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_reap(p_tenant text, p_reaper text, p_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_reap(p_tenant text, p_reaper text, p_limit bigint) TO relay_worker;
GRANT ALL ON FUNCTION relay.durable_reap(p_tenant text, p_reaper text, p_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_record_event(p_tenant text, p_job_id uuid, p_seq bigint, p_type text, p_actor text, p_channel text, p_holder text, p_detail jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_record_event(p_tenant text, p_job_id uuid, p_seq bigint, p_type text, p_actor text, p_channel text, p_holder text, p_detail jsonb) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_record_event(p_tenant text, p_job_id uuid, p_seq bigint, p_type text, p_actor text, p_channel text, p_holder text, p_detail jsonb) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_recount(p_tenant text, p_job_id uuid) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_refresh_counters(p_tenant text, p_job_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_refresh_counters(p_tenant text, p_job_id uuid) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_refresh_counters(p_tenant text, p_job_id uuid) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_release(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_to text, p_notify boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_release(p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_to text, p_notify boolean) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_remove(p_tenant text, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_remove(p_tenant text, p_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_remove(p_tenant text, p_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_renew(p_tenant text, p_rows tid[], p_rows_done bigint[], p_until timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_resolve(p_tenant text, p_job_id uuid, p_seq bigint, p_decision text, p_actor text, p_channel text, p_note text, OUT outcome text, OUT chunk_status text, OUT status text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_resolve(p_tenant text, p_job_id uuid, p_seq bigint, p_decision text, p_actor text, p_channel text, p_note text, OUT outcome text, OUT chunk_status text, OUT status text) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_resolve(p_tenant text, p_job_id uuid, p_seq bigint, p_decision text, p_actor text, p_channel text, p_note text, OUT outcome text, OUT chunk_status text, OUT status text) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_retire(p_tenant text, p_keep interval, p_abandoned interval, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_retire(p_tenant text, p_keep interval, p_abandoned interval, p_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_retire(p_tenant text, p_keep interval, p_abandoned interval, p_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_ring(p_tenant text, p_jobs uuid[], p_work boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_row_errors(p_tenant text, p_job_id uuid, p_limit bigint, p_after_seq bigint, p_after_row bigint, p_after_code text, p_seq bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_row_errors(p_tenant text, p_job_id uuid, p_limit bigint, p_after_seq bigint, p_after_row bigint, p_after_code text, p_seq bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_row_errors(p_tenant text, p_job_id uuid, p_limit bigint, p_after_seq bigint, p_after_row bigint, p_after_code text, p_seq bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_row_errors_add(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_errors jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_row_errors_add(p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_errors jsonb) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_run_sweeps(p_reaper text, p_limit bigint, p_lease interval, p_keep interval, p_abandoned interval, p_every interval[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_run_sweeps(p_reaper text, p_limit bigint, p_lease interval, p_keep interval, p_abandoned interval, p_every interval[]) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_run_sweeps(p_reaper text, p_limit bigint, p_lease interval, p_keep interval, p_abandoned interval, p_every interval[]) TO relay_worker;
GRANT ALL ON FUNCTION relay.durable_run_sweeps(p_reaper text, p_limit bigint, p_lease interval, p_keep interval, p_abandoned interval, p_every interval[]) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_seal(p_tenant text, p_job_id uuid, p_chunks bigint, p_notify boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_seal(p_tenant text, p_job_id uuid, p_chunks bigint, p_notify boolean) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.durable_set_chunk_statuses(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb, p_seqs bigint[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_set_chunk_statuses(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb, p_seqs bigint[]) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_set_chunk_statuses(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb, p_seqs bigint[]) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_set_job_status(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb, p_event jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_set_job_status(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb, p_event jsonb) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_set_job_status(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb, p_event jsonb) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_snapshot() FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_start(p_tenant text, p_job_id uuid, p_holder text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_sweep_chunks(p_tenant text, p_job_id uuid, p_from text[], p_to text, p_attempts text, p_seqs bigint[], p_error text, p_after bigint, p_limit bigint, OUT moved bigint, OUT last bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_sweep_turn(p_name text, p_every interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_sweep_turn(p_name text, p_every interval) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_sweep_turn(p_name text, p_every interval) TO relay_worker;
GRANT ALL ON FUNCTION relay.durable_sweep_turn(p_name text, p_every interval) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_tell(p_tenant text, p_job_id uuid, p_type text, p_seqs bigint[], p_actor text, p_channel text, p_holders text[], p_details jsonb[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_tenants(p_kinds text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_tenants(p_kinds text[]) TO relay_worker;

REVOKE ALL ON FUNCTION relay.durable_tenants_due(p_name text, p_keep interval, p_abandoned interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_tenants_due(p_name text, p_keep interval, p_abandoned interval) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_tenants_due(p_name text, p_keep interval, p_abandoned interval) TO relay_worker;
GRANT ALL ON FUNCTION relay.durable_tenants_due(p_name text, p_keep interval, p_abandoned interval) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_turn_to(p_tenant text, p_job_id uuid, p_status text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.durable_turns() FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_turns() TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_turns() TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_update_job(p_tenant text, p_job_id uuid, p_extra jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.durable_update_job(p_tenant text, p_job_id uuid, p_extra jsonb) TO relay_gateway;
GRANT ALL ON FUNCTION relay.durable_update_job(p_tenant text, p_job_id uuid, p_extra jsonb) TO relay_operator;

REVOKE ALL ON FUNCTION relay.durable_write_extra(p_tenant text, p_job_id uuid, p_extra jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.end_jobs(p_tenant text, p_at timestamp with time zone, p_by_holder boolean, p_late text, p_ns bigint[], p_rows tid[], p_status text, p_statuses text[], p_response_statuses bigint[], p_response_headers text[], p_response_bodies bytea[], p_error_codes text[], p_error_messages text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.enqueue(p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[], p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamp with time zone[], p_delays interval[], p_notify boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.enqueue(p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[], p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamp with time zone[], p_delays interval[], p_notify boolean) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.enqueue_bounded(p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[], p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamp with time zone[], p_delays interval[], p_max_pending bigint[], p_whole boolean, p_notify boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.enqueue_bounded(p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[], p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamp with time zone[], p_delays interval[], p_max_pending bigint[], p_whole boolean, p_notify boolean) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.enqueue_keyed(p_tenant text, p_job_id uuid, p_relay_id text, p_operation text, p_headers text, p_body bytea, p_max_attempts bigint, p_ttl interval, p_expires_at timestamp with time zone, p_delay interval, p_key text, p_lock_timeout interval, p_notify boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.enqueue_keyed(p_tenant text, p_job_id uuid, p_relay_id text, p_operation text, p_headers text, p_body bytea, p_max_attempts bigint, p_ttl interval, p_expires_at timestamp with time zone, p_delay interval, p_key text, p_lock_timeout interval, p_notify boolean) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.enqueue_keyed_bounded(p_tenant text, p_job_id uuid, p_relay_id text, p_operation text, p_headers text, p_body bytea, p_max_attempts bigint, p_ttl interval, p_expires_at timestamp with time zone, p_delay interval, p_key text, p_max_pending bigint, p_lock_timeout interval, p_notify boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.enqueue_keyed_bounded(p_tenant text, p_job_id uuid, p_relay_id text, p_operation text, p_headers text, p_body bytea, p_max_attempts bigint, p_ttl interval, p_expires_at timestamp with time zone, p_delay interval, p_key text, p_max_pending bigint, p_lock_timeout interval, p_notify boolean) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.expire_late(p_tenant text, p_relay text, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.expire_late(p_tenant text, p_relay text, p_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.expire_late(p_tenant text, p_relay text, p_limit bigint) TO relay_worker;
GRANT ALL ON FUNCTION relay.expire_late(p_tenant text, p_relay text, p_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.fetch_body(p_relay text, p_tenant text, p_job_id uuid, p_fence bigint, p_claimed_by text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.fetch_body(p_relay text, p_tenant text, p_job_id uuid, p_fence bigint, p_claimed_by text) TO relay_worker;

REVOKE ALL ON FUNCTION relay.grant_binding(p_login text, p_kind text, p_tenant text, p_relay text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.heartbeat(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_lease interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.heartbeat(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_lease interval) TO relay_worker;

REVOKE ALL ON FUNCTION relay.list_jobs(p_tenant text, p_relay text, p_status text, p_limit bigint, p_before uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.list_jobs(p_tenant text, p_relay text, p_status text, p_limit bigint, p_before uuid) TO relay_gateway;
GRANT ALL ON FUNCTION relay.list_jobs(p_tenant text, p_relay text, p_status text, p_limit bigint, p_before uuid) TO relay_operator;

REVOKE ALL ON FUNCTION relay.login_is(p_kinds text[], p_tenant text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.mark_expired(p_tenant text, p_job_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.mark_expired(p_tenant text, p_job_ids uuid[]) TO relay_gateway;
GRANT ALL ON FUNCTION relay.mark_expired(p_tenant text, p_job_ids uuid[]) TO relay_operator;

REVOKE ALL ON FUNCTION relay.my_bindings() FROM PUBLIC;
GRANT ALL ON FUNCTION relay.my_bindings() TO relay_gateway;
GRANT ALL ON FUNCTION relay.my_bindings() TO relay_worker;
GRANT ALL ON FUNCTION relay.my_bindings() TO relay_operator;

REVOKE ALL ON FUNCTION relay.notify(p_channel text, p_payload text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.now() FROM PUBLIC;
GRANT ALL ON FUNCTION relay.now() TO relay_gateway;
GRANT ALL ON FUNCTION relay.now() TO relay_worker;
GRANT ALL ON FUNCTION relay.now() TO relay_operator;

REVOKE ALL ON FUNCTION relay.outbox_back(p_tenant text, p_at timestamp with time zone, p_ns bigint[], p_rows tid[], p_outcomes text[], p_errors text[], p_delays interval[], p_max_attempts bigint, p_suspect boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_choose(p_tenant text, p_at timestamp with time zone, p_rows tid[], p_oldest timestamp with time zone, p_bytes bigint, p_first boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_claim(p_tenants text[], p_kinds text[], p_after timestamp with time zone[], p_limit bigint, p_claimed_by text, p_max_bytes bigint, p_horizon interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_claim(p_tenants text[], p_kinds text[], p_after timestamp with time zone[], p_limit bigint, p_claimed_by text, p_max_bytes bigint, p_horizon interval) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.outbox_count(p_tenant text, p_state text, p_kind text, p_key text, p_older interval, p_before uuid, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_count(p_tenant text, p_state text, p_kind text, p_key text, p_older interval, p_before uuid, p_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.outbox_count(p_tenant text, p_state text, p_kind text, p_key text, p_older interval, p_before uuid, p_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.outbox_drop(p_tenant text, p_rows tid[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_due(p_tenants text[], p_kinds text[], p_limit bigint, p_start text, p_stale interval, p_max_attempts bigint, p_look bigint, p_look_tenants text[], p_look_keys text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_due(p_tenants text[], p_kinds text[], p_limit bigint, p_start text, p_stale interval, p_max_attempts bigint, p_look bigint, p_look_tenants text[], p_look_keys text[]) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.outbox_enqueue(p_kind text, p_payload jsonb, p_key text, p_delay interval, p_tenant text, p_event_id uuid, p_notify boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_enqueue(p_kind text, p_payload jsonb, p_key text, p_delay interval, p_tenant text, p_event_id uuid, p_notify boolean) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.outbox_enqueue_many(p_tenant text, p_events jsonb, p_notify boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_enqueue_many(p_tenant text, p_events jsonb, p_notify boolean) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.outbox_health(p_tenant text, p_stale interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_health(p_tenant text, p_stale interval) TO relay_gateway;
GRANT ALL ON FUNCTION relay.outbox_health(p_tenant text, p_stale interval) TO relay_operator;

REVOKE ALL ON FUNCTION relay.outbox_hold(p_tenant text, p_rows tid[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_last(p_tenant text, p_key text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_list(p_tenant text, p_state text, p_kind text, p_limit bigint, p_before uuid, p_key text, p_older interval, p_payload bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_list(p_tenant text, p_state text, p_kind text, p_limit bigint, p_before uuid, p_key text, p_older interval, p_payload bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.outbox_list(p_tenant text, p_state text, p_kind text, p_limit bigint, p_before uuid, p_key text, p_older interval, p_payload bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.outbox_matching(p_tenant text, p_state text, p_kind text, p_key text, p_until timestamp with time zone, p_before uuid, p_limit bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_new_id(p_at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_open(p_tenant text, p_rows tid[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_park(p_tenant text, p_event_ids uuid[], p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_park(p_tenant text, p_event_ids uuid[], p_reason text) TO relay_gateway;
GRANT ALL ON FUNCTION relay.outbox_park(p_tenant text, p_event_ids uuid[], p_reason text) TO relay_operator;

REVOKE ALL ON FUNCTION relay.outbox_promote(p_tenant text, p_keys text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_purge(p_tenant text, p_older interval, p_limit bigint, p_kind text, p_key text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_purge(p_tenant text, p_older interval, p_limit bigint, p_kind text, p_key text) TO relay_gateway;
GRANT ALL ON FUNCTION relay.outbox_purge(p_tenant text, p_older interval, p_limit bigint, p_kind text, p_key text) TO relay_operator;

REVOKE ALL ON FUNCTION relay.outbox_restart(p_tenant text, p_at timestamp with time zone, p_rows tid[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_retry(p_tenant text, p_event_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_retry(p_tenant text, p_event_ids uuid[]) TO relay_gateway;
GRANT ALL ON FUNCTION relay.outbox_retry(p_tenant text, p_event_ids uuid[]) TO relay_operator;

REVOKE ALL ON FUNCTION relay.outbox_retry_parked(p_tenant text, p_older interval, p_limit bigint, p_kind text, p_key text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_retry_parked(p_tenant text, p_older interval, p_limit bigint, p_kind text, p_key text) TO relay_gateway;
GRANT ALL ON FUNCTION relay.outbox_retry_parked(p_tenant text, p_older interval, p_limit bigint, p_kind text, p_key text) TO relay_operator;

REVOKE ALL ON FUNCTION relay.outbox_ring(p_tenant text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.outbox_settle(p_claimed_by text, p_tenants text[], p_counts bigint[], p_event_ids uuid[], p_fences bigint[], p_outcomes text[], p_errors text[], p_delays interval[], p_max_attempts bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_settle(p_claimed_by text, p_tenants text[], p_counts bigint[], p_event_ids uuid[], p_fences bigint[], p_outcomes text[], p_errors text[], p_delays interval[], p_max_attempts bigint) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.outbox_show(p_tenant text, p_event_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_show(p_tenant text, p_event_id uuid) TO relay_gateway;
GRANT ALL ON FUNCTION relay.outbox_show(p_tenant text, p_event_id uuid) TO relay_operator;

REVOKE ALL ON FUNCTION relay.outbox_status(p_tenant text, p_stale interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_status(p_tenant text, p_stale interval) TO relay_gateway;
GRANT ALL ON FUNCTION relay.outbox_status(p_tenant text, p_stale interval) TO relay_operator;

REVOKE ALL ON FUNCTION relay.outbox_tenants(p_as text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_tenants(p_as text[]) TO relay_gateway;
GRANT ALL ON FUNCTION relay.outbox_tenants(p_as text[]) TO relay_operator;
GRANT ALL ON FUNCTION relay.outbox_tenants(p_as text[]) TO relay_api;

REVOKE ALL ON FUNCTION relay.outbox_unclaim(p_tenants text[], p_claimed_by text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.outbox_unclaim(p_tenants text[], p_claimed_by text) TO relay_gateway;

REVOKE ALL ON FUNCTION relay.pace(p_tenant text, p_relay text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.pending_upto(p_tenant text, p_relay text, p_limit bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.poll(p_tenant text, p_job_ids uuid[], p_batch_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.poll(p_tenant text, p_job_ids uuid[], p_batch_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.poll(p_tenant text, p_job_ids uuid[], p_batch_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.promote_due(p_tenant text, p_relay text, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.promote_due(p_tenant text, p_relay text, p_limit bigint) TO relay_worker;

REVOKE ALL ON FUNCTION relay.purge(p_tenant text, p_keep interval, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.purge(p_tenant text, p_keep interval, p_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.purge(p_tenant text, p_keep interval, p_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.ready_jobs(p_tenant text, p_rows tid[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.reclaim(p_relay text, p_tenants text[], p_limit bigint, p_lease interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.reclaim(p_relay text, p_tenants text[], p_limit bigint, p_lease interval) TO relay_gateway;
GRANT ALL ON FUNCTION relay.reclaim(p_relay text, p_tenants text[], p_limit bigint, p_lease interval) TO relay_worker;
GRANT ALL ON FUNCTION relay.reclaim(p_relay text, p_tenants text[], p_limit bigint, p_lease interval) TO relay_operator;

REVOKE ALL ON FUNCTION relay.reclaim_lost(p_tenant text, p_relay text, p_limit bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.reclaim_lost(p_tenant text, p_relay text, p_limit bigint) TO relay_gateway;
GRANT ALL ON FUNCTION relay.reclaim_lost(p_tenant text, p_relay text, p_limit bigint) TO relay_worker;
GRANT ALL ON FUNCTION relay.reclaim_lost(p_tenant text, p_relay text, p_limit bigint) TO relay_operator;

REVOKE ALL ON FUNCTION relay.release(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_started boolean[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.release(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_started boolean[]) TO relay_worker;

REVOKE ALL ON FUNCTION relay.renew_jobs(p_tenant text, p_rows tid[], p_until timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.request_digest(p_relay text, p_operation text, p_headers jsonb, p_body bytea, p_max_attempts bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.retry(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_delays interval[], p_give_backs boolean[], p_error_codes text[], p_error_messages text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.retry(p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_delays interval[], p_give_backs boolean[], p_error_codes text[], p_error_messages text[]) TO relay_worker;

REVOKE ALL ON FUNCTION relay.retry_after(p_pace interval, p_max_pending bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.return_jobs(p_tenant text, p_at timestamp with time zone, p_ns bigint[], p_rows tid[], p_give_backs boolean[], p_delays interval[], p_error_codes text[], p_error_messages text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.revoke_binding(p_login text, p_kind text, p_tenant text, p_relay text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.ring(p_kinds text[], p_tenants text[], p_relays text[], p_payloads text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.ring(p_kinds text[], p_tenants text[], p_relays text[], p_payloads text[]) TO relay_gateway;
GRANT ALL ON FUNCTION relay.ring(p_kinds text[], p_tenants text[], p_relays text[], p_payloads text[]) TO relay_worker;
GRANT ALL ON FUNCTION relay.ring(p_kinds text[], p_tenants text[], p_relays text[], p_payloads text[]) TO relay_operator;

REVOKE ALL ON FUNCTION relay.run_sweeps(p_relay text, p_limit bigint, p_lease interval, p_keep interval, p_every interval[]) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.run_sweeps(p_relay text, p_limit bigint, p_lease interval, p_keep interval, p_every interval[]) TO relay_gateway;
GRANT ALL ON FUNCTION relay.run_sweeps(p_relay text, p_limit bigint, p_lease interval, p_keep interval, p_every interval[]) TO relay_worker;
GRANT ALL ON FUNCTION relay.run_sweeps(p_relay text, p_limit bigint, p_lease interval, p_keep interval, p_every interval[]) TO relay_operator;

REVOKE ALL ON FUNCTION relay.session_age() FROM PUBLIC;
GRANT ALL ON FUNCTION relay.session_age() TO relay_gateway;
GRANT ALL ON FUNCTION relay.session_age() TO relay_worker;
GRANT ALL ON FUNCTION relay.session_age() TO relay_operator;

REVOKE ALL ON FUNCTION relay.set_tenant(p_tenant text) FROM PUBLIC;

REVOKE ALL ON FUNCTION relay.sweep_again(p_name text) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.sweep_again(p_name text) TO relay_gateway;
GRANT ALL ON FUNCTION relay.sweep_again(p_name text) TO relay_worker;
GRANT ALL ON FUNCTION relay.sweep_again(p_name text) TO relay_operator;

REVOKE ALL ON FUNCTION relay.sweep_turn(p_name text, p_every interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.sweep_turn(p_name text, p_every interval) TO relay_gateway;
GRANT ALL ON FUNCTION relay.sweep_turn(p_name text, p_every interval) TO relay_worker;
GRANT ALL ON FUNCTION relay.sweep_turn(p_name text, p_every interval) TO relay_operator;

REVOKE ALL ON FUNCTION relay.tenants_due(p_name text, p_relay text, p_keep interval) FROM PUBLIC;
GRANT ALL ON FUNCTION relay.tenants_due(p_name text, p_relay text, p_keep interval) TO relay_gateway;
GRANT ALL ON FUNCTION relay.tenants_due(p_name text, p_relay text, p_keep interval) TO relay_worker;
GRANT ALL ON FUNCTION relay.tenants_due(p_name text, p_relay text, p_keep interval) TO relay_operator;
GRANT ALL ON FUNCTION relay.tenants_due(p_name text, p_relay text, p_keep interval) TO relay_api;

REVOKE ALL ON FUNCTION relay.unbind_tenant(p_before text) FROM PUBLIC;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE relay.durable_chunk TO relay_api;
GRANT SELECT ON TABLE relay.durable_chunk TO relay_sweep;

GRANT SELECT,INSERT,DELETE ON TABLE relay.durable_event TO relay_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE relay.durable_job TO relay_api;
GRANT SELECT ON TABLE relay.durable_job TO relay_sweep;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE relay.durable_row_error TO relay_api;

GRANT SELECT,INSERT,UPDATE ON TABLE relay.durable_turn TO relay_api;

GRANT SELECT ON TABLE relay.installation TO relay_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE relay.outbox TO relay_api;
GRANT SELECT ON TABLE relay.outbox TO relay_sweep;

GRANT SELECT,INSERT,DELETE ON TABLE relay.role_binding TO relay_api;
GRANT SELECT ON TABLE relay.role_binding TO relay_sweep;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE relay.s2r_relay_dispatch_queue TO relay_api;
GRANT SELECT ON TABLE relay.s2r_relay_dispatch_queue TO relay_sweep;

GRANT SELECT,INSERT,DELETE ON TABLE relay.s2r_relay_dispatch_request TO relay_api;

GRANT SELECT,INSERT,DELETE ON TABLE relay.s2r_relay_dispatch_result TO relay_api;
GRANT SELECT ON TABLE relay.s2r_relay_dispatch_result TO relay_sweep;

GRANT UPDATE(completed_at) ON TABLE relay.s2r_relay_dispatch_result TO relay_api;

GRANT SELECT ON TABLE relay.s2r_relay_dispatch TO relay_operator;

GRANT SELECT,INSERT,DELETE ON TABLE relay.s2r_relay_dispatch_key TO relay_api;

GRANT SELECT ON TABLE relay.schema_history TO relay_api;
GRANT SELECT ON TABLE relay.schema_history TO relay_sweep;
GRANT SELECT ON TABLE relay.schema_history TO relay_gateway;
GRANT SELECT ON TABLE relay.schema_history TO relay_worker;
GRANT SELECT ON TABLE relay.schema_history TO relay_operator;

GRANT SELECT,INSERT,UPDATE ON TABLE relay.sweep TO relay_api;
